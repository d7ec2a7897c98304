"""Keys that nothing reads are warnings, by one rule; the recipe loads."""

from refusals import briefs, wrong_key

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.config.base import collect_problems
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


def test_all_keys_of_experts_have_no_effect_in_a_dense_model():
    of_experts = {name for name in ModelConfig.model_fields if name.startswith("moe_")}
    assert {key for key, switch, _ in ModelConfig.read_unless if switch == "num_moe_experts"} == of_experts
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    dense = ModelConfig(**sizes, moe_router_bias_update_rate=0.1)
    assert briefs(collect_problems(dense)) == ["moe_router_bias_update_rate: has-no-effect (num_moe_experts)"]
