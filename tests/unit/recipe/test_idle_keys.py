"""Keys that nothing reads are warnings, by one rule; the recipe loads."""

from refusals import wrong_key

from nemo_rl_mcore.recipe.load import load_config, load_with_warnings


def test_what_has_no_effect_changes_no_size(exemplar):
    config = load_config(exemplar, ["++grpo.batch_multiplier=1.3", "++grpo.max_rollout_turns=9"])
    assert config.prompts_per_step == config.grpo.num_prompts_per_step
    assert config.max_rollout_turns == 1


def test_a_warning_says_where_its_key_is_set_and_hides_no_error(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {exemplar}\ngrpo: {{batch_multiplier: 1.5}}\n")
    (warning,) = load_with_warnings(recipe)[1]
    assert warning.where.endswith("recipe.yaml:2")
    with wrong_key("seed: not-allowed"):
        load_config(recipe, ["seed=-1"])
