"""Recipes that would take memory or time without end, or values that nothing can use: one clear error, at once."""

import time

import pytest
import yaml

from nemo_rl_mcore import cli
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.yaml_text import require_bounded

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + one)}: &{chr(98 + one)} [{','.join([f'*{chr(97 + one)}'] * 9)}]\n" for one in range(8)
)
BRANCHES = "".join(f"k{one}: ${{k{one + 1}}}${{k{one + 1}}}\n" for one in range(40))
TEXTS = {
    "laughs": LAUGHS,
    "itself": "a: &a [*a]\n",
    "itself in a section": "a: &a {b: *a}\n",
    "deep": "x: " + "[" * 400 + "]" * 400 + "\n",
    "open": "{a: " * 20_000,
    "digits": "seed: 1" + "0" * 5_000 + "\n",
    "base": "seed: 0x1" + "0" * 5_000 + "\n",
    "long": "seed: " + "x " * 40_000 + "\n",
    "large": "# " + "x" * 2**20 + "\n",
    "list": "seed: ${mul:[1],100000000}\n",
    "text": "seed: ${mul:'aaaaaaaaaa',1000000000}\n",
    "product": "seed: ${mul:" + ",".join(["9999999999"] * 40) + "}\n",
    "chain": "".join(f"k{one}: ${{k{one + 1}}}\n" for one in range(2_000)),
    "branches": BRANCHES,
    "section in itself": "seed: {x: '${seed}', y: '${seed}'}\n",
    "device": None,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("command", ["check", "migrate", "grpo"])
def test_a_recipe_without_end_is_refused(tmp_path, exemplar, capsys, command, text):
    recipe = tmp_path / "recipe.yaml"
    if text is None:
        recipe.symlink_to("/dev/zero")
    else:
        recipe.write_text(text if text.startswith("{") else f"defaults: {exemplar}\n{text}")
    ours = tmp_path / "ours.yaml"
    named = [str(recipe), "--output", str(ours)] if command == "migrate" else ["--config", str(recipe)]
    assert cli.main([command, *named]) == (1 if command == "migrate" and not ours.exists() else 2)
    assert len(capsys.readouterr().err) < 2_000


@pytest.mark.parametrize("names", ["{next}", "[{next}, {next}]"], ids=["chain", "diamonds"])
def test_a_file_below_many_others_is_refused_before_all_are_read(tmp_path, exemplar, capsys, names):
    for number in range(400):
        parents = names.format(next=f"{number + 1}.yaml")
        (tmp_path / f"{number}.yaml").write_text(f"defaults: {parents}\n")
    (tmp_path / "400.yaml").write_text(f"defaults: {exemplar}\n")
    begin = time.process_time()
    assert cli.main(["check", "--config", str(tmp_path / "0.yaml")]) == 2
    assert time.process_time() - begin < 2
    assert len(capsys.readouterr().err) < 2_000


def test_a_recipe_of_a_hundred_files_is_read(tmp_path, exemplar):
    for number in range(99):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: {number + 1}.yaml\n")
    (tmp_path / "99.yaml").write_text(exemplar.read_text())
    assert load_config(tmp_path / "0.yaml")
    (tmp_path / "99.yaml").write_text(f"defaults: {exemplar}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "0.yaml")
    assert [problem.code for problem in caught.value.problems] == ["too-large"]


@pytest.mark.parametrize(
    "override",
    ["seed=1" + "0" * 5_000, "++data.x=" + "[" * 400 + "]" * 400, "++seed='${mul:[1],100000000}'"],
    ids=["digits", "deep", "list"],
)
def test_an_override_without_end_is_refused(load, override):
    with pytest.raises(ConfigError):
        load(override)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"logger.log_dir={'n' * 5_000}", "logger.log_dir"),
        (f"++checkpointing.checkpoint_dir=a/{'n' * 256}", "checkpointing.checkpoint_dir"),
        (f"++policy.init_checkpoint={'n' * 256}", "policy.init_checkpoint"),
    ],
)
def test_a_value_that_nothing_can_use_is_refused(refusals, override, key):
    (problem,) = refusals(override)
    assert problem.startswith(f"{key}: ")


def test_references_of_a_usual_recipe_are_read(tmp_path, exemplar):
    text = "eval: {sets: {rows: &rows {data_path: rows.jsonl}, others: *rows}}\n"
    require_bounded(text)
    assert yaml.safe_load(text)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {exemplar}\n{text}")
    config = load_config(recipe)
    assert config.eval is not None
    assert len(config.eval.sets) == 2
