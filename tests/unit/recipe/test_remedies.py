"""Whoever follows a remedy is not sent back, nor told to change weights, nor told of consequences beside the cause."""

from pathlib import Path

from omegaconf import OmegaConf

from nemo_rl_mcore.recipe.sources import Recipe, places


def test_a_section_set_to_null_is_no_place_of_its_keys(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("policy:\n  model: null\n")
    found = places(Recipe(OmegaConf.create(), (Path(exemplar), recipe)), [])
    assert "policy.model.num_layers" not in found
    assert found["policy.model"].endswith("/recipe.yaml:2")
    assert Path(found["policy.precision"]).name.startswith("grpo_copy_cpu.yaml:")
