import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from refusals import briefs, wrong_key
from rows_of_files import EXEMPLAR, recipe_over
from rows_of_files import prompts as rows

from nemo_rl_mcore.config import ConfigError, DataConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig, names_of
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.schema import is_known
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.render import subject_of


def test_a_type_is_a_custom_data_set():
    assert DataConfig.model_validate({"type": "a.b:C", "args": {"n": 1}}).dataset_name == "custom"


@pytest.fixture
def plan(tmp_path):
    """The plan of the exemplar over a file of rows, with changes to its tree."""

    def planner(rows, algorithm="grpo", section=None, **changes):
        return preflight(recipe_over(tmp_path, rows, algorithm, section, **changes))

    return planner


def problems(plan, *arguments, **changes):
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **changes)
    return briefs(caught.value.problems)


def test_passes_over_the_rows_end_the_run(plan):
    made = plan(rows(100), section={"max_num_epochs": 2})
    assert made.data.rows + made.data.held_out == 100
    assert made.steps == made.data.steps == 2 * made.data.rows // 16
    assert made.config.max_prompt_length == 4
    assert plan(rows(100), section={"max_num_steps": 3, "max_num_epochs": 2}).steps == 3
    assert plan(rows(100), section={"max_num_steps": 300, "max_num_epochs": None}).steps == 300


WHOLE = {"split_validation_size": 0}


@pytest.mark.parametrize(
    ("count", "algorithm", "section", "train", "problem"),
    [
        (12, "grpo", {}, {}, "grpo.num_prompts_per_step: too-few-rows"),
        # What dynamic sampling replaces is taken from the next pass, where this one is over.
        (100, "grpo", {"use_dynamic_sampling": True}, {}, None),
        # No more held-out rows are taken than there are.
        (100, "grpo", {"val_at_end": True}, {}, None),
        (
            100,
            "grpo",
            {"val_at_end": True, "max_val_samples": 64},
            WHOLE,
            "grpo.max_val_samples: too-few-rows",
        ),
        (
            100,
            "grpo",
            {"val_at_end": True, "max_val_samples": None},
            WHOLE,
            "grpo.max_val_samples: too-few-rows",
        ),
        *(
            (
                400,
                "sft",
                {"val_at_end": True, "max_val_samples": 0, "val_batches": batches, **size},
                train,
                told,
            )
            for batches in (1, 9, -1)
            for size, train, told in (
                ({}, {}, None),
                ({"val_global_batch_size": 64}, {}, None),
                ({}, WHOLE, "sft.val_batches: too-few-rows"),
            )
        ),
    ],
)
def test_rows_are_enough_for_a_step_and_a_validation(
    plan, tmp_path, count, algorithm, section, train, problem
):
    data = {"train": {"data_path": str(tmp_path / "rows.jsonl"), **train}}
    if problem is None:
        assert plan(rows(count), algorithm, section, data=data).data.rows >= 16
    else:
        assert problems(plan, rows(count), algorithm, section, data=data) == [problem]


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
    [warning] = [one for one in plan(pairs, "dpo", policy=policy).warnings if one.path == "data.train"]
    assert warning.code == "no-signal"
    assert warning.what.startswith("10 of 40 ")


def test_bad_lines_and_missing_files_are_problems_of_the_recipe(plan, tmp_path):
    assert problems(plan, [{"input": "1>"}]) == ["data.train.data_path: wrong-row"]
    gone = {"train": {"data_path": "gone.jsonl"}}
    assert problems(plan, [], data=gone) == ["data.train.data_path: not-readable"]


def test_a_template_is_needed_where_it_is_to_be_applied(plan, tmp_path):
    chat = {"data": {"apply_chat_template": True}}
    needed = ["data.apply_chat_template: requires"]
    assert problems(plan, rows(100), **chat) == needed
    model = load_config(EXEMPLAR).policy.model.model_dump(exclude_unset=True) | {"vocab_size": VOCABULARY}
    bare, whole = (
        {"model": model, "tokenizer": {"name": save_chat_tokenizer(tmp_path / name, template)}}
        for name, template in (("bare", None), ("chat", "{{ messages }}"))
    )
    assert problems(plan, rows(100), policy=bare, **chat) == needed
    assert plan(rows(100), policy=whole, **chat)


@pytest.mark.parametrize(
    ("algorithm", "given", "kind"),
    [
        ("grpo", {}, RowKind.PROMPTS),
        ("sft", {}, RowKind.ANSWERS),
        ("dpo", {}, RowKind.PAIRS),
        ("dpo", {"num_generations_per_prompt": 2}, RowKind.PROMPTS),
    ],
)
def test_what_an_algorithm_reads_of_a_row(tmp_path, algorithm, given, kind):
    assert recipe_over(tmp_path, None, algorithm, given).row_kind is kind


def test_classes_that_are_not_there_are_problems_of_the_plan(plan):
    own = {"env": {"custom": {"type": "gone.env:Env"}}, "loss_fn": {"type": "gone.loss:Loss"}}
    found = problems(plan, rows(100), **own)
    assert [problem.partition(":")[0] for problem in found] == ["loss_fn.type", "env.custom.type"]


SETS = {"gsm8k": {"dataset_name": "gsm8k", "split": "test"}}


@pytest.fixture
def recipe(tmp_path, exemplar):
    """Write the exemplar with other sections, and give its path."""

    def writer(**sections):
        tree = yaml.safe_load(exemplar.read_text()) | sections
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return tmp_path / "recipe.yaml"

    return writer


def train(*sources, **keys):
    return {"train": list(sources) if len(sources) > 1 else sources[0], **keys}


A, B = {"data_path": "a.jsonl"}, {"data_path": "b.jsonl"}


def test_an_override_reaches_into_a_list(recipe):
    path = recipe(data=train(A, B), eval={"sets": SETS})
    config = load_config(path, ["data.train.1.input_key=question", "eval.sets.gsm8k.split=train"])
    assert config.train_sources["data.train.1"].input_key == "question"
    assert config.eval.sets["gsm8k"].split == "train"
    assert is_known("data.train.0.split")
    assert not is_known("data.train.0.spit")


def test_a_list_takes_the_place_of_a_section(recipe, tmp_path):
    recipe(data=train(A))
    child = tmp_path / "child.yaml"
    child.write_text("defaults: recipe.yaml\ndata: {train: [{data_path: b}, {data_path: c, weigth: 2}]}")
    with wrong_key("data.train.1.weigth: unknown-key", "child.yaml:2"):
        load_config(child)


def test_a_set_of_a_parent_is_removed_by_null(recipe, tmp_path):
    recipe(data=train(A), eval={"sets": {"theirs": A, "kept": B}})
    child = tmp_path / "child.yaml"
    child.write_text("defaults: recipe.yaml\neval: {sets: {theirs: null, mine: {data_path: c}}}")
    assert [*load_config(child).eval.sets] == ["kept", "mine"]
    child.write_text("defaults: recipe.yaml\neval: {sets: {theirs: null, kept: null}}")
    with pytest.raises(ConfigError) as caught:
        load_config(child)
    assert [problem.path for problem in caught.value.problems] == ["eval.sets"]


def test_defaults_and_what_validation_takes_from_train(recipe):
    data = {
        "default": {"prompt_file": "p.txt"},
        "train": {"dataset_name": "GSM8K", "input_key": "q"},
        "validation": {"split": "test"},
    }
    config = load_config(recipe(data=data, eval={"sets": {"math500": {"dataset_name": "MATH-500"}}}))
    (one,) = config.validation_sources.values()
    assert (one.input_key, one.output_key, one.split, one.paths) == ("q", "answer", "test", ("openai/gsm8k",))
    assert {one.prompt_file, config.eval.sets["math500"].prompt_file} == {"p.txt"}
    assert config.eval.sets["math500"].answer == "answer"
    data["validation"] = ["math500", {"data_path": "rows.csv"}]
    config = load_config(recipe(data=data, eval={"sets": {"math500": {"dataset_name": "MATH-500"}}}))
    assert list(config.validation_sources) == ["eval.sets.math500", "data.validation.1"]


def test_files_beside_the_recipe_are_found_from_anywhere(recipe, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "a", "output": "b"}\n')
    data = load_config(recipe(data=train(A, B))).train_sources
    assert data["data.train.0"].data_path == str(tmp_path / "a.jsonl")
    assert data["data.train.1"].data_path == "b.jsonl"


def test_a_recipe_written_out_reads_back_alike(recipe, tmp_path):
    data = {
        "default": {"prompt_file": "p.txt"},
        "train": [{"dataset_name": "gsm8k", "weight": 1}, {**B, "weight": 2}],
    }
    data["validation"] = ["math500", {"data_path": ["a.csv", "b.csv"]}]
    config = load_config(recipe(data=data, eval={"sets": {"math500": {"dataset_name": "MATH-500"}}}))
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.jsonl", "b/a.jsonl", "c/a.jsonl"], ["a", "a_2", "a_3"]),
        (["a_3.jsonl", "a.jsonl", "b/a.jsonl"], ["a_3", "a", "a_2"]),
        (["a.jsonl", "b/a.jsonl", "a_2.jsonl"], ["a", "a_2", "a_2_2"]),
    ],
)
def test_each_source_has_a_name_of_its_own(paths, names):
    sources = {path: SourceConfig(data_path=path) for path in paths}
    assert [*names_of(sources).values()] == names
