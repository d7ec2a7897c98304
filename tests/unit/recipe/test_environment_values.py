"""What a recipe takes from the environment: the reference is saved, a change of the value is seen, nothing shows it."""

import json

import pytest
import yaml

from nemo_rl_mcore import cli
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.driver.run_folder import changes_since, read_recipe_of, recipe_text
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.evaluate.samples import identity_of

SECRET = "s3cr3t-v4lue"
KEY = "env.custom.args.api_key"


@pytest.fixture
def write(tmp_path, exemplar, monkeypatch):
    """Write a recipe over the exemplar, with SECRET in the environment's JUDGE_KEY."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)

    def recipe(args, more=""):
        path = tmp_path / "recipe.yaml"
        custom = f"env:\n  custom:\n    type: my:Judge\n    args: {args}\n"
        path.write_text(f"defaults: {exemplar}\n{custom}{more}")
        return path

    return recipe


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ("${oc.env:JUDGE_KEY}", "${oc.env:JUDGE_KEY}"),
        ("${oc.env:JUDGE_KEY,other}", "${oc.env:JUDGE_KEY,'other'}"),
        ("${oc.env:NOT_SET,${oc.env:JUDGE_KEY}}", "${oc.env:NOT_SET,'${oc.env:JUDGE_KEY}'}"),
        ("Bearer ${oc.env:JUDGE_KEY}", "Bearer ${oc.env:JUDGE_KEY}"),
        ("${logger.wandb.name}", "${oc.env:JUDGE_KEY}"),
        ("${oc.decode:${oc.env:JUDGE_KEY}}", "${oc.decode:${oc.env:JUDGE_KEY}}"),
    ],
)
def test_the_reference_is_saved_and_loads_again(write, tmp_path, given, saved):
    config = load_config(write(f"{{api_key: '{given}'}}", "logger: {wandb: {name: '${oc.env:JUDGE_KEY}'}}\n"))
    assert SECRET in config.env.custom.args["api_key"]
    text = recipe_text(config)
    assert SECRET not in text
    assert yaml.safe_load(text)["env"]["custom"]["args"]["api_key"] == saved
    (tmp_path / "config.yaml").write_text(text)
    again = load_config(tmp_path / "config.yaml")
    assert again.env == config.env
    assert changes_since(read_recipe_of(tmp_path), again) == []


def test_values_in_lists_and_copies_are_references_too(write, tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", "models/tokenizer")
    config = load_config(
        write("{keys: [a, ['${oc.env:JUDGE_KEY}']]}", "logger: {wandb: {name: '${oc.env:JUDGE_KEY}'}}\n"),
        ["+policy.init_checkpoint=${oc.env:FOLDER}"],
    )
    text = recipe_text(config)
    assert SECRET not in text
    assert "models/tokenizer" not in text
    assert SECRET not in json.dumps([config.model_dump(mode="json"), config.model_dump(mode="json")])


def test_an_evaluation_keeps_references_alone(write):
    sets = "eval: {sets: {rows: {data_path: rows.jsonl}}}\n"
    config = load_config(write("{api_key: '${oc.env:JUDGE_KEY}'}", sets))
    assert SECRET not in json.dumps(identity_of(config, {}))


def test_a_run_goes_on_under_another_value_and_reports_another_reference(write, tmp_path, monkeypatch):
    recipe = write("{api_key: '${oc.env:JUDGE_KEY}'}")
    (tmp_path / "config.yaml").write_text(recipe_text(load_config(recipe)))
    monkeypatch.setenv("JUDGE_KEY", "0ther-v4lue")
    monkeypatch.setenv("NEW_KEY", "0ther-key")
    assert changes_since(read_recipe_of(tmp_path), load_config(recipe)) == []
    other = load_config(write("{api_key: '${oc.env:NEW_KEY}'}"))
    (change,) = changes_since(read_recipe_of(tmp_path), other)
    assert change.path == KEY
    assert SECRET not in str(change)
    assert "0ther" not in str(change)


@pytest.mark.parametrize(("was", "changes"), [(SECRET, 0), ("older", 1)])
def test_a_value_that_was_saved_in_plain_is_compared_and_not_shown(write, tmp_path, was, changes):
    config = load_config(write("{api_key: '${oc.env:JUDGE_KEY}'}"))
    tree = config.plain()
    tree["env"]["custom"]["args"]["api_key"] = was
    found = changes_since(tree, config)
    assert len(found) == changes
    assert was not in " ".join(map(str, found))


@pytest.mark.parametrize("key", ["seed", "policy.precision", "env.custom.args", "nope"])
def test_a_mistake_shows_the_reference(write, capsys, key):
    recipe = write("{api_key: 1}")
    assert cli.main(["check", "--config", str(recipe), f"++{key}=${{oc.env:JUDGE_KEY}}"]) == 2
    said = capsys.readouterr().err
    assert key in said
    assert SECRET not in said


OPTIMIZER = "policy.megatron_cfg.optimizer"


@pytest.mark.parametrize(
    ("value", "overrides"),
    [
        ("q7", ["policy.precision=${oc.env:PIN}"]),
        ("0.7", [f"{OPTIMIZER}.lr=${{oc.env:PIN}}", f"{OPTIMIZER}.min_lr=1"]),  # told beside another
    ],
)
def test_a_short_value_is_not_shown_where_its_key_is_judged(load, monkeypatch, value, overrides):
    monkeypatch.setenv("PIN", value)
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    assert value not in str(refused.value)
    assert "oc.env:PIN" in str(refused.value)


def test_sizes_of_the_weights_are_saved_as_they_are(write, monkeypatch):
    """The tensors next to the recipe show them, and a checkpoint is read without the variable."""
    monkeypatch.setenv("LAYERS", "3")
    of_model = "policy: {model: {num_layers: '${oc.decode:${oc.env:LAYERS}}'}}\n"
    text = recipe_text(load_config(write("{}", of_model)))
    assert yaml.safe_load(text)["policy"]["model"]["num_layers"] == 3
