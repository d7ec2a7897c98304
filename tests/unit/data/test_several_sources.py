"""Several sources of a run, from the recipe to the rows of a step."""

import json
from collections import Counter

import pytest
import yaml
from refusals import wrong_key

from nemo_rl_mcore.data.answers import answer_row
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.sources import open_prompts, open_sets
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight

EXEMPLAR = "examples/configs/grpo_copy_cpu.yaml"
CHAR = load_tokenizer("char")


@pytest.fixture
def recipe(tmp_path, request):
    """The exemplar over files of rows: a name says how many, and how its prompts begin."""

    def make(files, data, section=None, algorithm="grpo", **sections):
        for name, count in files.items():
            rows = [{"input": f"{name[0]}{number}>", "output": f"{number}"} for number in range(count)]
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
        tree = yaml.safe_load((request.config.rootpath / EXEMPLAR).read_text())
        if algorithm != "grpo":
            del tree["grpo"], tree["loss_fn"]
        loop = tree.get(algorithm, {"max_num_steps": 5})
        tree[algorithm] = {**loop, "val_period": 0, "val_at_end": False, **(section or {})}
        tree |= {"data": data, **sections}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / "recipe.yaml")

    return make


def source(name, **keys):
    return {"data_path": f"{name}.jsonl", "split_validation_size": 0, **keys}


def test_rows_of_sources_without_weights_are_joined(recipe):
    config = recipe({"a1": 30, "b1": 10}, {"train": [source("a1"), source("b1")]})
    drawn = open_prompts(config, CHAR)
    prompts = [prompt for step in range(1, 6) for prompt in drawn.train_batch(step, 16)]
    assert Counter(prompt.index for prompt in prompts) == dict.fromkeys(range(40), 2)
    assert {(prompt.source, prompt.text[0]) for prompt in prompts} == {("a1", "a"), ("b1", "b")}
    assert preflight(config).data.rows == 40


def test_weights_share_out_the_prompts(recipe):
    train = [source("a1", weight=0.75), source("b1", weight=0.25)]
    config = recipe({"a1": 12, "b1": 40}, {"train": train})
    drawn = open_prompts(config, CHAR)
    for step in range(1, 9):
        batch = drawn.train_batch(step, 16)
        assert {prompt.source for prompt in batch} == {"a1", "b1"}
        assert len({prompt.index for prompt in batch}) == 16
        assert batch == open_prompts(config, CHAR).train_batch(step, 16)
    assert preflight(recipe({}, {"train": train}, {"max_num_epochs": 3})).steps == 3 * 52 // 16


@pytest.mark.parametrize(
    ("files", "train", "section", "key", "of"),
    [
        (
            {"a1": 11, "b1": 40},
            [source("a1", weight=3), source("b1", weight=1)],
            {},
            "data.train.0.weight: too-few-rows",
            [16, 12, 11, "'a1'"],
        ),
        (
            {"a1": 9, "b1": 6},
            [source("a1"), source("b1")],
            {},
            "grpo.num_prompts_per_step: too-few-rows",
            [16],
        ),
        (
            {"a1": 9},
            [source("a1", weight=3), source("b1")],
            {},
            "data.train.1.weight: missing",
            [],
        ),
    ],
)
def test_shares_that_cannot_be(recipe, files, train, section, key, of):
    with wrong_key(key, *of):
        preflight(recipe(files, {"train": train}, section))


def test_validation_takes_as_many_rows_of_each_source_and_names_of_sets(recipe):
    sets = {"easy": source("e1"), "hard": source("h1")}
    config = recipe(
        {"a1": 20, "e1": 3, "h1": 40},
        {"train": source("a1"), "validation": ["easy", "hard", source("a1", split="train[:50%]")]},
        {"val_at_end": True, "max_val_samples": 12},
        eval={"sets": sets},
    )
    prompts = open_prompts(config, CHAR).validation(12)
    assert Counter(prompt.source for prompt in prompts) == {"easy": 3, "hard": 5, "a1": 4}
    assert len({prompt.index for prompt in prompts}) == 12
    assert [prompt.text for prompt in open_sets(config, CHAR)["easy"]] == ["e0>", "e1>", "e2>"]


def test_texts_around_prompts_are_those_of_the_source_or_of_all(recipe, tmp_path):
    for name, text in (("all", "1{}"), ("own", "2{}"), ("system", "3")):
        (tmp_path / f"{name}.txt").write_text(text)
    train = [source("a1"), source("b1", prompt_file="own.txt", system_prompt_file="system.txt")]
    config = recipe({"a1": 10, "b1": 10}, {"train": train, "default": {"prompt_file": "all.txt"}})
    sources = config.train_sources, config.validation_sources
    examples, problems = read_examples(*sources, config.row_kind, chat=False)
    assert problems == []
    assert [examples.train[row].text for row in (0, 10)] == ["1a0>", "3\n2b0>"]
    (tmp_path / "all.txt").write_text("no place")
    with wrong_key("data.train.0.prompt_file: not-allowed", 0):
        preflight(config)


def test_sft_imitates_the_solution_and_is_scored_on_the_answer_in_it(recipe, tmp_path):
    rows = [{"question": f"{number}=", "answer": f"0#{number}"} for number in range(40)]
    (tmp_path / "g.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train = {"dataset_name": "gsm8k", "data_path": "g.jsonl", "answer": {"after": "#"}}
    config = recipe({}, {"train": train}, {"max_val_samples": 2, "val_at_end": True}, algorithm="sft")
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"train_global_batch_size": 2})}
    )
    drawn = open_prompts(config, CHAR)
    prompt = drawn.train_batch(1, 2)[0]
    assert prompt.answer == prompt.text[:-1]
    assert CHAR.decode(answer_row(prompt, CHAR).ids) == f"{prompt.text}0#{prompt.answer}"
    assert all(prompt.answer == prompt.text[:-1] for prompt in drawn.validation(2))


def test_a_gold_is_not_taken_twice(recipe):
    data = {"train": source("a1", answer={"after": "####"})}
    env = {"math": {"gold": {"after": "####"}}}
    with wrong_key("env.math.gold: incompatible (answer)", "data.train.answer"):
        recipe({"a1": 20}, data, env=env)


def test_data_of_the_hub_are_not_fetched_by_a_check(recipe):
    config = recipe({"a1": 3}, {"train": [{"dataset_name": "gsm8k"}, source("a1")]})
    plan = preflight(config)
    assert (plan.data, plan.fetched) == (None, ("openai/gsm8k",))
    with wrong_key("data.train.1.data_path: not-readable", "'gone.jsonl'"):
        preflight(recipe({}, {"train": [{"dataset_name": "gsm8k"}, source("gone")]}))
