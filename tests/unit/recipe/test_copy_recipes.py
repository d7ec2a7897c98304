"""Recipes that come with the package: found by name, listed, and copied with what they need."""

import filecmp
from pathlib import Path

import pytest

from nemo_rl_mcore import cli
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.shipped import SHIPPED, shipped_recipe
from nemo_rl_mcore.recipe.sources import read_recipe

CONFIGS = Path(__file__).parents[3] / "examples/configs"
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_package_holds_the_examples_and_no_second_copy():
    assert SHIPPED.resolve() == CONFIGS.resolve()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("grpo_copy_cpu.yaml", "grpo_copy_cpu.yaml"),
        ("grpo_copy_cpu", "grpo_copy_cpu.yaml"),
        ("quickstart/sft_cpu.yaml", "quickstart/sft_cpu.yaml"),
        ("sft_cpu.yaml", "sft_cpu.yaml"),  # not that of the quick start
        ("rloo_cpu", "recipes/variants/rloo_cpu.yaml"),
        ("elsewhere/rloo_cpu.yaml", None),
        ("../configs/grpo_copy_cpu.yaml", None),
        ("grpo_copy", None),
    ],
)
def test_names(name, found):
    assert shipped_recipe(name) == (None if found is None else SHIPPED / found)


def test_defaults_finds_a_file_beside_the_recipe_before_a_shipped_one(empty_folder):
    own = empty_folder / "own.yaml"
    own.write_text("defaults: grpo_copy_cpu.yaml\ngrpo:\n  max_num_steps: 7\n")
    assert load_config(own).grpo.max_val_samples == 64
    shipped = (CONFIGS / "grpo_copy_cpu.yaml").read_text()
    (empty_folder / "grpo_copy_cpu.yaml").write_text(
        shipped.replace("max_val_samples: 64", "max_val_samples: 32")
    )
    assert load_config(own).grpo.max_val_samples == 32


def test_a_name_that_nobody_has(empty_folder):
    with pytest.raises(ConfigError, match=r"nope.yaml: no such file; .* `nemo-rl-mcore recipes` lists"):
        load_config("nope.yaml")


def test_the_list_names_every_recipe(capsys):
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == NAMES
    assert cli.main(["recipes", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == listed


@pytest.mark.stage("docs")
@pytest.mark.smoke("grpo_copy_cpu.yaml", "quickstart/dpo_cpu.yaml", "recipes/variants/rloo_cpu.yaml")
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_means_what_the_original_means_and_needs_nothing_of_the_package(name, empty_folder, capsys):
    assert cli.main(["recipes", "copy", name, "copies"]) == 0
    copies = empty_folder / "copies"
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == sorted(path.relative_to(empty_folder) for path in copies.rglob("*.yaml"))
    assert all(path.is_relative_to(copies) for path in read_recipe(copies / name).files)
    copy, original = (load_config(folder / name).model_dump_json() for folder in (copies, SHIPPED))
    assert copy == original.replace(str(SHIPPED), str(copies))
    assert str(SHIPPED) not in copy


def test_a_folder_is_copied_whole_with_the_parents_above_it(empty_folder):
    assert cli.main(["recipes", "copy", "quickstart"]) == 0
    compared = filecmp.dircmp(CONFIGS / "quickstart", empty_folder / "quickstart", ignore=["__pycache__"])
    assert (compared.left_only, compared.right_only, compared.diff_files) == ([], [], [])
    above = {path.name for path in empty_folder.iterdir()}
    assert above == {"quickstart", "grpo_copy_cpu.yaml", "grpo_math_7B.yaml"}
    config = load_config("quickstart/sft_cpu.yaml")
    assert Path(config.policy.tokenizer.name) == empty_folder / "quickstart/tokenizer"


def test_a_parent_that_is_there_stays_where_it_is_the_same(empty_folder, capsys):
    assert cli.main(["recipes", "copy", "grpo_copy_cpu"]) == 0
    assert cli.main(["recipes", "copy", "sft_cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == ["grpo_copy_cpu.yaml", "sft_cpu.yaml"]
    assert cli.main(["recipes", "copy", "sft_cpu"]) == 2


@pytest.mark.parametrize("name", ["grpo_copy_cpu", "quickstart"])
def test_nothing_is_overwritten(name, empty_folder, capsys):
    (empty_folder / "grpo_copy_cpu.yaml").write_text("mine")
    assert cli.main(["recipes", "copy", name]) == 2
    assert "DEST: grpo_copy_cpu.yaml already exists" in capsys.readouterr().err
    assert [path.name for path in empty_folder.iterdir()] == ["grpo_copy_cpu.yaml"]


@pytest.mark.parametrize("name", ["nope", "", "..", "../configs", "/etc"])
def test_what_is_no_recipe_is_not_copied(name, empty_folder, capsys):
    assert cli.main(["recipes", "copy", name]) == 2
    assert f"NAME: no recipe {name!r}" in capsys.readouterr().err
    assert [*empty_folder.iterdir()] == []
