import pytest
import yaml
from refusals import assert_holds, brief, wrong_key

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.source import SourceConfig, names_of
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.schema import is_known

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


NEAREST = {
    "inptu_key": "input_key",
    "promt_file": "prompt_file",
    "splitt": "split",
    "temprature": "temperature",
}


@pytest.mark.parametrize(
    ("data", "evaluation", "message"),
    [
        (
            train({**A, "inptu_key": "q"}),
            None,
            "data.train.inptu_key: unknown-key",
        ),
        (
            train(A, {**B, "inptu_key": "q"}),
            None,
            "data.train.1.inptu_key: unknown-key",
        ),
        (train(A, {**B, "input_key": 3}), None, "data.train.1.input_key: not-allowed"),
        (train(A, {**B, "weight": 0}), None, "data.train.1.weight: not-allowed"),
        (train(A, {"split": "test"}), None, "data.train.1.data_path: missing (dataset_name)"),
        (train({"dataset_name": "gsmk8"}), None, "data.train.dataset_name: not-supported"),
        (train(A, validation=["gsm"]), {"sets": SETS}, "data.validation.0: not-found (sets)"),
        (train(A, validation="gsm8k"), None, "data.validation: not-found (sets)"),
        ({"train": 3}, None, "data.train: not-allowed"),
        ({"train": ["a.jsonl", A]}, None, "data.train: not-allowed"),
        (
            train(A, B, default={"promt_file": "a"}),
            None,
            "data.default.promt_file: unknown-key",
        ),
        (train(A), {"sets": {}}, "eval.sets: missing"),
        (train(A), {"sets": {"a": {**A, "splitt": "x"}}}, "eval.sets.a.splitt: unknown-key"),
        (train(A), {"sets": {"a": {**A, "split": 3}}}, "eval.sets.a.split: not-allowed"),
        (train(A), {"sets": {"a b": A}}, "eval.sets.a b: not-allowed"),
        (train(A), {"sets": {"a": {}}}, "eval.sets.a.data_path: missing (dataset_name)"),
        (train(A), {"sets": SETS, "temprature": 1}, "eval.temprature: unknown-key"),
        (train(A), {"sets": SETS, "num_tests_per_prompt": 4}, "eval.temperature: incompatible (num_tests_per_prompt)"),
        (train({**A, "answer": {}}), None, "data.train.answer: one-of (after)"),
        (train(A, {**B, "answer": {"after": ""}}), None, "data.train.1.answer.after: not-allowed"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_once_with_its_path(recipe, data, evaluation, message):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(data=data, eval=evaluation))
    (problem,) = caught.value.problems
    assert brief(problem) == message
    if problem.code == "unknown-key":
        assert_holds(problem.remedy, NEAREST[problem.path.rpartition(".")[2]])
    left_out = ("data.train.1.data_path", "eval.sets.a.data_path", "eval.temperature")  # which stand nowhere
    assert ("recipe.yaml:" in problem.where) == (problem.path not in left_out)


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
