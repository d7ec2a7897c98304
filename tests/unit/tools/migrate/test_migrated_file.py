"""The file that a migration writes: its head, what stands behind a key, and files of prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.recipe.load import compute, load_config
from nemo_rl_mcore.recipe.of_nemo_rl import leaf_paths
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.recipe.validate import validate
from nemo_rl_mcore.tools.migrate.draft import Kind, Note
from nemo_rl_mcore.tools.migrate.migrate import Migrated, migrate, recipe_text

FOLDER = Path(__file__).parents[3] / "fixtures/nemo_rl"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


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
    if short.config is not None:
        assert not [*silent_differences(migrated, short.config.plain())]


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
