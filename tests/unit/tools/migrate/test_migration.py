"""Recipes of NeMo RL become ours: what is kept, what is changed, and what is said."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import assert_holds

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings
from nemo_rl_mcore.tools.migrate.migrate import migrate, recipe_text

FOLDER = Path(__file__).parents[3] / "fixtures/nemo_rl"
SIX = {
    "dpo-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
    "grpo-llama3.2-1b-instruct-1n8g-megatron": 0,
    "grpo-qwen3-30ba3b-2n8g-megatron_fused_linear_logprobs": 0,
    "grpo_math_1B_megatron": 0,
    "ppo_math_1B_megatron": 0,
    "sft-qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs": 0,
}
"""The exit status of each: 2 where something of theirs is refused."""
OTHERS = {
    "grpo_math_1B": 0,
    "grpo_math_1B_megatron_single_controller": 0,
    "grpo_multiple_datasets": 0,
    "distillation_math_megatron": 2,
}


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


def run(name: str, tmp_path: Path) -> tuple[int, Path]:
    ours = tmp_path / "ours.yaml"
    return main(["migrate", str(FOLDER / f"{name}.yaml"), "--output", str(ours)]), ours


@pytest.mark.parametrize(("name", "status"), SIX.items())
def test_the_result_passes_without_an_edit(name, status, tmp_path):
    given, ours = run(name, tmp_path)
    assert given == status
    config, warnings = load_with_warnings(ours)
    assert not warnings
    assert config.data.apply_chat_template


@pytest.mark.parametrize("name", [*SIX, *OTHERS])
def test_what_is_kept_has_its_value_and_nothing_is_lost(name):
    migrated = migrate(FOLDER / f"{name}.yaml")
    draft, theirs = migrated.draft, leaves(migrated.read.tree)
    ours, said = leaves(yaml.safe_load(recipe_text(migrated, name))), {note.path for note in draft.notes}
    accounted = (*said, *draft.dropped, *draft.refused)
    for path, value in theirs.items():
        if (
            path in said or value is None or path in ("data.train", "data.validation")
        ):  # lists, of which a row is below
            continue
        if value_at(draft.tree, path) is not None:
            assert value_at(draft.tree, path) == value, path
        elif path not in ours:
            assert any(path == other or path.startswith(f"{other}.") for other in accounted) or value in (
                {},
                [],
            ), path


@pytest.mark.parametrize(("name", "status"), OTHERS.items())
def test_a_file_is_written_even_where_something_is_open(name, status, tmp_path):
    given, ours = run(name, tmp_path)
    assert given == status
    assert value_at(yaml.safe_load(ours.read_text()), "data.apply_chat_template") is True


def theirs(tmp_path: Path, changes: str, base: str = "grpo_math_1B_megatron") -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{changes}\n")
    return path


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
