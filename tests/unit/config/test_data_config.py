import json

import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from refusals import briefs

from nemo_rl_mcore.config import ConfigError, DataConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.render import subject_of


def test_a_type_is_a_custom_data_set():
    assert DataConfig.model_validate({"type": "a.b:C", "args": {"n": 1}}).dataset_name == "custom"


# On paper: what a file means for a run


@pytest.fixture
def plan(tmp_path, exemplar):
    """The plan of the exemplar over a file of rows, with changes to its tree."""

    def planner(rows, **changes):
        tree = yaml.safe_load(exemplar.read_text())
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        tree["data"] = {"dataset_name": "jsonl", "train": {"data_path": str(path)}}
        tree["grpo"] |= {"val_period": 0, "val_at_end": False}
        for key, value in changes.items():
            tree[key] = {**(tree.get(key) or {}), **value} if isinstance(value, dict) else value
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree))
        return preflight(load_config(recipe))

    return planner


def rows(count):
    return [{"input": f"{number}>", "output": number} for number in range(count)]


def problems(plan, *arguments, **changes):
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **changes)
    return briefs(caught.value.problems)


def test_passes_over_the_rows_end_the_run(plan):
    made = plan(rows(100), grpo={"max_num_epochs": 2})
    assert made.data.rows + made.data.held_out == 100
    assert made.steps == made.data.steps == 2 * made.data.rows // 16
    assert made.config.max_prompt_length == 4
    assert plan(rows(100), grpo={"max_num_steps": 3, "max_num_epochs": 2}).steps == 3
    assert plan(rows(100), grpo={"max_num_steps": 300, "max_num_epochs": None}).steps == 300


def test_an_embedded_task_does_not_end(exemplar):
    made = preflight(load_config(exemplar))
    assert (made.data, made.steps) == (None, 300)


def test_too_few_rows_for_a_step(plan):
    (problem,) = problems(plan, rows(12))
    assert problem.startswith("grpo.num_prompts_per_step: too-few-rows")
    # What dynamic sampling replaces is taken from the next pass, where this one is over.
    assert plan(rows(100), grpo={"use_dynamic_sampling": True}).data.rows >= 16


def test_too_few_held_out_rows(plan, tmp_path):
    # No more is taken than there is.
    assert plan(rows(100), grpo={"val_at_end": True}).data.held_out < 64
    whole = {"train": {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0}}
    for most in (None, 64):
        grpo = {"val_at_end": True, "max_val_samples": most}
        (problem,) = problems(plan, rows(100), grpo=grpo, data=whole)
        assert problem.startswith("grpo.max_val_samples: too-few-rows")


@pytest.mark.parametrize("val_batches", [1, 9, -1])
def test_the_loss_of_a_validation_takes_as_many_held_out_rows_as_there_are(plan, tmp_path, val_batches):
    loop = {"max_num_steps": 5, "val_at_end": True, "max_val_samples": 0, "val_batches": val_batches}
    for sft in (loop, loop | {"val_global_batch_size": 64}):
        plan(rows(400), grpo=None, loss_fn=None, sft=sft)
    whole = {"train": {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0}}
    (problem,) = problems(plan, rows(400), grpo=None, loss_fn=None, sft=loop, data=whole)
    assert problem.startswith("sft.val_batches: too-few-rows")


@pytest.mark.parametrize(
    ("template", "data", "said"),
    [
        (True, {"apply_chat_template": True}, "applied"),
        (True, {}, "not applied, although"),
        (False, {}, "not applied: the tokenizer has none"),
    ],
)
def test_whether_prompts_are_shown_in_the_chat_template_is_told(plan, tmp_path, template, data, said):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"chat_template": "x"}' if template else "{}")
    policy = {"tokenizer": {"name": str(tmp_path / "tokenizer")}}
    subject = {one.name: one.found for one in subject_of(plan(rows(100), data=data, policy=policy))}
    assert subject["chat template"].startswith(said)


def test_pairs_of_equal_answers_are_counted(plan):
    pairs = [{"prompt": f"{n}>", "chosen": "1", "rejected": "12"[n % 4 > 0]} for n in range(40)]
    policy = {"train_global_batch_size": 4, "train_micro_batch_size": 1}
    made = plan(pairs, grpo=None, loss_fn=None, dpo={"max_num_steps": 3}, policy=policy)
    [warning] = [one for one in made.warnings if one.path == "data.train"]
    assert warning.code == "no-signal"
    assert warning.what.startswith("10 of 40 ")


def test_bad_lines_and_missing_files_are_problems_of_the_recipe(plan, tmp_path):
    (problem,) = problems(plan, [{"input": "1>"}])
    assert problem.startswith("data.train.data_path: wrong-row")
    data = {"data_path": "gone.jsonl"}
    (problem,) = problems(plan, [], data={"train": data})
    assert problem.startswith("data.train.data_path: not-readable")


def test_a_template_is_needed_where_it_is_to_be_applied(plan, tmp_path):
    (problem,) = problems(plan, rows(100), data={"apply_chat_template": True})
    assert problem.startswith("data.apply_chat_template: requires")
    for name, template in (("bare", None), ("chat", "{{ messages }}")):
        save_chat_tokenizer(tmp_path / name, template)
    tree = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["policy"]
    policy = {"model": tree["model"] | {"vocab_size": VOCABULARY}}
    chat = {"data": {"apply_chat_template": True}}
    (problem,) = problems(
        plan, rows(100), policy=policy | {"tokenizer": {"name": str(tmp_path / "bare")}}, **chat
    )
    assert "data.apply_chat_template: requires" in problem
    assert plan(rows(100), policy=policy | {"tokenizer": {"name": str(tmp_path / "chat")}}, **chat)


def test_classes_that_are_not_there(plan):
    found = problems(
        plan,
        rows(100),
        env={"custom": {"type": "gone.env:Env"}},
        loss_fn={"type": "gone.loss:Loss"},
    )
    assert [problem.partition(":")[0] for problem in found] == ["loss_fn.type", "env.custom.type"]


@pytest.mark.parametrize(
    ("algorithm", "given", "kind"),
    [
        ("grpo", {}, RowKind.PROMPTS),
        ("sft", {}, RowKind.ANSWERS),
        ("dpo", {}, RowKind.PAIRS),
        ("dpo", {"num_generations_per_prompt": 2}, RowKind.PROMPTS),
    ],
)
def test_what_an_algorithm_reads_of_a_row(tmp_path, exemplar, algorithm, given, kind):
    tree = yaml.safe_load(exemplar.read_text())
    if algorithm != "grpo":
        del tree["grpo"], tree["loss_fn"]
        tree[algorithm] = {"max_num_steps": 5, **given}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert load_config(tmp_path / "recipe.yaml").row_kind is kind
