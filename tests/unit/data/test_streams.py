import json
from itertools import chain

import datasets
import pytest
import yaml
from library_files import write_parquet
from refusals import refused

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.data.sources import StreamSource, open_prompts
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.evaluate.generate import Asked, prompts_to_answer

EXEMPLAR = "examples/configs/grpo_copy_cpu.yaml"
CHAR = load_tokenizer("char")
ROWS = [{"input": f"{number:03d}>", "output": number} for number in range(100)]
OFF = {"val_period": 0, "val_at_start": False, "val_at_end": False}


@pytest.fixture
def recipe(tmp_path, request, monkeypatch):
    """The exemplar over a stream of rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def make(rows=ROWS, written="jsonl", grpo=None, **data):
        path = tmp_path / f"rows.{written}"
        if written == "parquet":
            write_parquet(path, rows)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        tree = yaml.safe_load((request.config.rootpath / EXEMPLAR).read_text())
        tree["data"] = {"train": {"data_path": str(path), "streaming": True}, **data}
        tree["grpo"] |= {**OFF, **(grpo or {})}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / "recipe.yaml")

    return make


def indices(source, step):
    return [prompt.index for prompt in source.train_batch(step, 16)]


# At the end of a pass over parquet the library sleeps for 10 s.
@pytest.mark.parametrize("written", ["jsonl", pytest.param("parquet", marks=pytest.mark.exhaustive)])
def test_a_stream_goes_on_exactly_where_it_was(recipe, written):
    config = recipe(written=written)
    whole = open_prompts(config, CHAR)
    assert type(whole) is StreamSource
    steps = [indices(whole, step) for step in range(1, 16)]
    resumed = open_prompts(config, CHAR)
    assert [indices(resumed, step) for step in (9, 10)] == steps[8:10]
    assert indices(resumed, 10) == steps[9]  # asked again
    assert indices(resumed, 2) == steps[1]  # and before
    prompt = whole.train_batch(15, 16)[0]
    assert (prompt.text, prompt.answer) == (f"{prompt.index:03d}>", str(prompt.index))


def test_passes_are_shuffled_anew_and_a_step_holds_no_row_twice(recipe):
    source = open_prompts(recipe(), CHAR)
    steps = [indices(source, step) for step in range(1, 13)]
    assert all(len(set(step)) == 16 for step in steps)
    first, second = [*chain(*steps[:6])], [*chain(*steps[6:])]
    assert len(set(first)) == len(set(second)) == 96
    assert first != second
    assert first != sorted(first)


def test_without_a_shuffle_each_pass_is_as_the_rows_lie(recipe):
    source = open_prompts(recipe(shuffle=False), CHAR)
    assert [*chain(*(indices(source, step) for step in range(1, 13)))] == [*range(96)] * 2


def test_rows_that_are_too_long_are_left_out_or_end_the_run(recipe):
    rows = [*ROWS, *({"input": "1" * 9, "output": 1} for _ in range(100))]
    source = open_prompts(recipe(rows, overlong="drop"), CHAR)
    steps = [indices(source, step) for step in range(1, 7)]
    assert len({*chain(*steps)}) == 96
    assert indices(open_prompts(recipe(rows, overlong="drop"), CHAR), 6) == steps[5]
    with refused("row-length", "rows.jsonl, row", 9):
        open_prompts(recipe(rows), CHAR)


def test_validation_is_read_whole(recipe, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"input": "7>", "output": 7}\n' * 8)
    validation = {"data_path": str(tmp_path / "held_out.jsonl")}
    source = open_prompts(
        recipe(grpo={"val_at_end": True, "max_val_samples": 8}, validation=validation), CHAR
    )
    assert [prompt.answer for prompt in source.validation(8)] == ["7"] * 8


def test_a_validation_takes_no_more_rows_than_there_are(recipe, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"input": "7>", "output": 7}\n' * 3)
    validation = {"data_path": str(tmp_path / "held_out.jsonl")}
    config = recipe(grpo={"val_at_end": True, "max_val_samples": 8}, validation=validation)
    assert len(open_prompts(config, CHAR).validation(8)) == 3


def test_generate_takes_the_held_out_prompts_that_there_are(recipe, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"input": "7>", "output": 7}\n' * 3)
    config = recipe(validation={"data_path": str(tmp_path / "held_out.jsonl")})
    assert len(prompts_to_answer(config, Asked(), CHAR)) == 3
    with refused("no-prompts", "--prompt"):
        prompts_to_answer(recipe(), Asked(), CHAR)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input": "1>"}] * 20, r"data.train.data_path: .*row \d+: no key 'output'; it has 'input'"),
        (
            [{"input": "1>", "output": 1}] * 20 + [3],
            r"data.train.data_path: .*rows.jsonl:21: not an object but int",
        ),
        (ROWS[:10], "data.train: a pass over the stream has fewer rows than the 16 of a step"),
    ],
)
def test_rows_that_do_not_serve_are_told_before_the_run(recipe, rows, message):
    with pytest.raises(ConfigError, match=message):
        open_prompts(recipe(rows), CHAR)


def test_values_are_those_of_the_lines(recipe):
    answers = [1, 1.5, "007", "2020-01-02", "x"] * 4
    rows = [{"input": f"{number}>", "output": answer} for number, answer in enumerate(answers)]
    source = open_prompts(recipe(rows), CHAR)
    assert {prompt.answer for prompt in source.train_batch(1, 16)} == {*map(str, answers)}
