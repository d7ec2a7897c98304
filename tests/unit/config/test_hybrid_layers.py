"""Patterns of layers, and what does not go with them."""

from refusals import brief, briefs

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.config.base import collect_problems

HYBRID = (
    *(
        "policy.model.num_layers=4",
        "policy.model.hybrid_layer_pattern=M-M*",
        "policy.model.mamba_num_heads=4",
    ),
    *("policy.model.mamba_num_groups=2", "policy.model.activation_func=squared_relu"),
)
MODEL, MEGATRON = "policy.model", "policy.megatron_cfg"


def test_a_hybrid_is_megatrons_hybrid_model(load):
    policy = load(*HYBRID).policy
    assert (policy.model_class, policy.parts_of_a_layer) == ("hybrid", 1)
    policy = load(f"{MEGATRON}.model_class=hybrid").policy
    assert (policy.model_class, policy.parts_of_a_layer) == ("hybrid", 2)
    assert (load().policy.model_class, load().policy.parts_of_a_layer) == ("gpt", 1)


def test_all_keys_of_mamba_layers_have_no_effect_without_them():
    of_mamba = {name for name in ModelConfig.model_fields if name.startswith("mamba_")}
    assert {key for key, switch, _ in ModelConfig.read_unless if switch == "hybrid_layer_pattern"} == of_mamba
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    plain = ModelConfig(**sizes, mamba_num_heads=4)
    assert briefs(collect_problems(plain)) == ["mamba_num_heads: has-no-effect (hybrid_layer_pattern)"]


def test_rotations_have_no_effect_without_positions(load):
    found = [
        brief(problem) for problem in collect_problems(load(*HYBRID, f"{MODEL}.rotary_base=7.0").policy.model)
    ]
    assert found == ["rotary_base: has-no-effect (hybrid_layer_pattern)"]
