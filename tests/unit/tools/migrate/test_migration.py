"""Recipes of NeMo RL become ours: the file that is written, what is kept, what is changed, and what is said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrations import FOLDER
from refusals import assert_holds

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.recipe.load import compute, load_config, load_with_warnings
from nemo_rl_mcore.recipe.of_nemo_rl import leaf_paths
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.recipe.validate import validate
from nemo_rl_mcore.tools.migrate.draft import Kind, Note
from nemo_rl_mcore.tools.migrate.migrate import Migrated, migrate, recipe_text

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
STATUSES = {
    "dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
    "grpo-llama3.2-1b-instruct-1n8g-megatron": 0,
    "grpo-qwen3-30ba3b-2n8g-megatron_fused_linear_logprobs": 0,
    "grpo_math_1B_megatron": 0,
    "ppo_math_1B_megatron": 0,
    "sft-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
    "grpo_math_1B": 0,
    "grpo_math_1B_megatron_single_controller": 0,
    "grpo_multiple_datasets": 0,
    "distillation_math_megatron": 2,
}
"""The exit status of each: 2 where something of theirs is refused."""
WITHOUT_AN_EDIT = [*STATUSES][:6]


def run(name: str, tmp_path: Path) -> tuple[int, Path]:
    ours = tmp_path / "ours.yaml"
    return main(["migrate", str(FOLDER / f"{name}.yaml"), "--output", str(ours)]), ours


@pytest.mark.parametrize(("name", "status"), STATUSES.items())
def test_a_file_is_written_even_where_something_is_open(name, status, tmp_path):
    given, ours = run(name, tmp_path)
    assert given == status
    assert value_at(yaml.safe_load(ours.read_text()), "data.apply_chat_template") is True
    if name in WITHOUT_AN_EDIT:
        assert not load_with_warnings(ours)[1]


def theirs(tmp_path: Path, changes: str, base: str = "grpo_math_1B_megatron") -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{changes}\n")
    return path


def head_of(text: str) -> list[str]:
    lines = text.splitlines()
    return [line for line in lines if line.startswith("#")]


def test_what_is_changed_or_to_settle_stands_behind_its_key_and_else_at_the_head(tmp_path):
    changes = """
policy: {model_name: some/thing, megatron_cfg: {}, draft: {enabled: true}, train_global_batch_size: "${gone}"}
grpo: {val_period: -1}"""
    text = recipe_text(migrate(theirs(tmp_path, changes)), "theirs.yaml")
    assert text.splitlines()[0].startswith("# Made by `nemo-rl-mcore migrate`")
    head = head_of(text)
    assert any(line.startswith("# Refused: policy.draft: {enabled: true, ") for line in head)
    assert any(line.startswith("# Left for you to settle: policy.train_global_batch_size: ") for line in head)
    assert "\n  val_period: 0  # -1 -> 0; " in text
    assert "\n  model_name: some/thing  # " in text
    assert "val_start_at" not in text, "neutral keys are counted"


def test_what_stands_behind_values_of_all_shapes_leaves_them_as_they_are(tmp_path):
    migrated = migrate(theirs(tmp_path, ""))
    values = {
        "a": [1, {"b": "x\n\ny # z\u2028"}],
        "c": {},
        "d": "${oc.env:E}",
        "f": {"g": [], "h": None},
        "i": "t" * 300,
    }
    migrated.draft.tree = values
    paths = ("a", "a.1.b", "c", "d", "f", "f.g", "f.h", "i")
    migrated.draft.notes = [Note(Kind.CHANGED, path, "some: #\nwhat") for path in paths]
    text = recipe_text(migrated, "theirs.yaml")
    assert yaml.safe_load(text) == values
    assert text.count("# some: # what") == len(paths)


def test_a_list_with_something_refused_in_it_is_written(tmp_path):
    changes = "data: {validation: [{dataset_name: DAPOMathAIME2024, nonsense: 16}, {dataset_name: DAPOMathAIME2024}]}"
    text = recipe_text(migrate(theirs(tmp_path, changes)), "theirs.yaml")
    assert value_at(yaml.safe_load(text), "data.validation") == [{"dataset_name": "DAPOMathAIME2024"}] * 2
    assert "\n# Refused: data.validation.0.nonsense: 16; " in text


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_recipe_and_nothing_differs_without_a_word(name, tmp_path):
    migrated = migrate(FOLDER / f"{name}.yaml")
    whole, short = validate(migrated.draft.tree), validate(resolved(recipe_text(migrated, name), tmp_path))
    assert short.problems == whole.problems
    assert short.config == whole.config
    ours = migrated.draft.tree if short.config is None else short.config.plain()
    assert not [*silent_differences(migrated, ours)]


def silent_differences(migrated: Migrated, ours: dict[str, Any]) -> Iterator[str]:
    """Yield each key of theirs whose value is another one in the run, and of which nothing was said.

    A section that is null or empty has defaults, of which it says nothing.
    """
    draft, theirs = migrated.draft, migrated.read.tree
    said = (*(note.path for note in draft.notes), *draft.refused, *draft.dropped)
    moved = {source: target for target, source in draft.origins.items()}
    for path in leaf_paths(theirs):
        value, own = value_at(theirs, path), value_at(ours, moved.get(path, path))
        is_said = any(path == other or path.startswith(f"{other}.") for other in said)
        of_a_set = path.startswith(("data.train", "data.validation"))  # completed by what is known of it
        if (
            own != value
            and not is_said
            and not of_a_set
            and not (value in ({}, None) and (not own or isinstance(own, dict)))
        ):
            yield f"{path}: {value} there, and {own} here"


def resolved(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "ours.yaml"
    path.write_text(text)
    return compute(read_recipe(path), ()).tree


def test_a_file_of_prompts_is_copied_next_to_the_recipe(tmp_path, monkeypatch):
    """It is found above the recipe, as in NeMo RL's repository, or where the command starts."""
    repository, ours = tmp_path / "theirs", tmp_path / "ours"
    folder = repository / "examples/configs/recipes"
    for path in (folder, repository / "examples/prompts", ours):
        path.mkdir(parents=True)
    recipe = theirs(folder, "data: {default: {prompt_file: examples/prompts/own.txt}}")
    prompt = repository / "examples/prompts/own.txt"
    assert main(["migrate", str(recipe), "--output", str(ours / "none.yaml")]) == 2, "there is no such file"
    prompt.write_text("Mine: {}")
    for name, status in (("a.yaml", 0), ("b.yaml", 0)):
        assert main(["migrate", str(recipe), "--output", str(ours / name)]) == status
    assert (ours / "own.txt").read_text() == "Mine: {}"
    prompt.write_text("Another: {}")
    monkeypatch.chdir(repository)
    assert main(["migrate", str(recipe), "--output", str(ours / "c.yaml")]) == 0
    assert (ours / "own.txt").read_text() == "Mine: {}"
    assert (ours / "c_own.txt").read_text() == "Another: {}"
    named = [
        value_at(yaml.safe_load((ours / f"{x}.yaml").read_text()), "data.default.prompt_file") for x in "abc"
    ]
    assert named == ["own.txt", "own.txt", "c_own.txt"]
    source = load_config(ours / "c.yaml").data.default
    assert source is not None
    assert source.prompt_file == str(ours / "c_own.txt")


def test_what_check_says_of_files_is_left_open(tmp_path, capsys):
    """A prompt file without a place for the prompt is no mistake of a key, and `check` refuses it."""
    (tmp_path / "wrong.txt").write_text("no place")
    recipe = theirs(tmp_path, "data: {default: {prompt_file: wrong.txt}}")
    ours = tmp_path / "out/ours.yaml"
    ours.parent.mkdir()
    assert main(["migrate", str(recipe), "--output", str(ours)]) == 2
    assert any("data.train.prompt_file: " in line for line in head_of(ours.read_text()))
    assert main(["check", "--config", str(ours)]) == 2


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        ("{policy: {megatron_cfg: {}, is_vlm: true}, grpo: {}, other: 1}", "policy.is_vlm"),
        (
            "{policy: {megatron_cfg: {}}, grpo: {}, data: {train: [{}, {processor: vlm_hf_data_processor}]}}",
            "data.train.1.processor",
        ),
    ],
)
def test_images_and_sound_are_one_problem_alone(recipe, path, tmp_path):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(recipe)
    with pytest.raises(ConfigError) as caught:
        migrate(theirs)
    assert [(problem.code, problem.path) for problem in caught.value.problems] == [("not-supported", path)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "not-readable"),
        ("- a", "wrong-kind"),
        ("defaults: missing.yaml\ngrpo: {}", "not-found"),
        ("rm: {}\npolicy: {}", "wrong-kind"),
        ("eval: {}\ngeneration: {}", "wrong-kind"),
        ("grpo: {a: 1}\nsft: {a: 1}", "wrong-kind"),
        ("grpo: {a: 1}", "wrong-kind"),
        ("grpo: {a: 1}\npolicy: {model_name: x}", "wrong-kind"),
    ],
)
def test_what_is_no_recipe(text, code, tmp_path, capsys):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    with pytest.raises(ConfigError) as caught:
        migrate(theirs)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert str(theirs) in problem.path
    assert main(["migrate", str(theirs), "--output", str(tmp_path / "ours.yaml")]) == 1
    assert str(theirs) in capsys.readouterr().err
    assert not (tmp_path / "ours.yaml").exists()


def test_no_file_is_overwritten(tmp_path, capsys):
    (tmp_path / "ours.yaml").write_text("mine")
    assert run("grpo_math_1B_megatron", tmp_path)[0] == 1
    assert_holds(capsys.readouterr().err, "--output", tmp_path / "ours.yaml")
    assert (tmp_path / "ours.yaml").read_text() == "mine"


def test_the_name_of_the_file_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml")]) == 0
    assert (tmp_path / "grpo_math_1B_megatron_mcore.yaml").exists()


@pytest.mark.parametrize("wrong", [["--nonsense"], ["--output"]])
def test_a_wrong_command_line_writes_no_file_and_says_so_in_its_status(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml"), *wrong])
    assert caught.value.code == 1
    assert not [*tmp_path.iterdir()]


def test_overrides_are_of_their_recipe(tmp_path):
    ours = tmp_path / "ours.yaml"
    given = ("policy.train_global_batch_size=256", "policy.draft.enabled=true")
    status = main(
        ["migrate", str(FOLDER / "grpo_math_1B_megatron.yaml"), given[0], "--output", str(ours), given[1]]
    )
    assert status == 2
    text = ours.read_text()
    assert text.startswith(
        "# Made by `nemo-rl-mcore migrate` from NeMo RL's grpo_math_1B_megatron.yaml policy.train_g"
    )
    assert given[1] in text.splitlines()[0]
    assert value_at(yaml.safe_load(text), "policy.megatron_cfg.scheduler.lr_warmup_iters") == 26
    assert "# Refused: policy.draft: " in text


def test_rows_that_do_not_exist_are_replaced_by_files_that_are_named(tmp_path, capsys):
    theirs = yaml.safe_load((FOLDER / "grpo_math_1B_megatron.yaml").read_text())
    theirs["data"] |= {
        "train": {"data_path": "/path/to/train.jsonl"},
        "validation": {"data_path": "/cache/val.jsonl"},
    }
    theirs["data"]["default"]["prompt_file"] = None
    recipe, rows, ours = (tmp_path / name for name in ("theirs.yaml", "rows=1.jsonl", "ours.yaml"))
    recipe.write_text(yaml.safe_dump(theirs))
    rows.write_text(
        "".join(f'{{"input": "{number} + 1 = ?", "output": "{number + 1}"}}\n' for number in range(99))
    )
    command = ["migrate", str(recipe), "--output"]
    assert main([*command, str(tmp_path / "open.yaml"), "--data", str(rows)]) == 2
    told = capsys.readouterr().out
    assert "`migrate --data validation=FILE`" in told
    assert "--data train" not in told
    assert main([*command, str(ours), f"--data=train={rows}", f"--data=validation={rows}"]) == 0
    assert {one.data_path for one in load_config(ours).train_sources.values()} == {str(rows)}


@pytest.mark.parametrize(
    ("name", "model"), [("/path/to/model", "Qwen/Qwen3-1.7B"), ("See the guide", "Qwen/Qwen3-8B")]
)
def test_a_placeholder_gets_the_model_that_is_named(name, model, tmp_path, capsys):
    theirs = yaml.safe_load((FOLDER / "grpo_math_1B_megatron.yaml").read_text())
    theirs["policy"] |= {"model_name": name, "tokenizer": {"name": name}}
    theirs["data"]["default"]["prompt_file"] = None
    recipe, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    recipe.write_text(yaml.safe_dump(theirs))
    (problem,) = (one for one in migrate(recipe).problems if one.path == "policy.model_name")
    assert problem.code == "not-found"
    assert "--model" in problem.remedy
    assert main(["migrate", str(recipe), "--output", str(ours), "--model", model]) == 0
    config = load_config(ours)
    assert (config.policy.model_name, config.policy.tokenizer.name) == (model, model)
    assert main(["migrate", str(recipe), "--output", str(tmp_path / "x"), "--model", f"teacher={model}"]) == 1
    assert_holds(capsys.readouterr().err, "--model", "teacher.model_name", "policy")
