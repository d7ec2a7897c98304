"""Adapters in a recipe: which layers a name is, what is refused at load, what `check` counts."""

import pytest

from nemo_rl_mcore.models.adapters import adapted_weights
from nemo_rl_mcore.models.memory import estimate_memory

PEFT = "policy.megatron_cfg.peft"
ENABLED = f"+{PEFT}.enabled=true"
EXPERTS = ["policy.model.num_moe_experts=4", "policy.model.qk_layernorm=true"]
LAYER_0 = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def names(config):
    return {*adapted_weights(config.policy).values()}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [f"{layer}.{name}" for layer in (0, 1) for name in LAYER_0]),
        (
            [f"+{PEFT}.target_modules=[linear_qkv]"],
            ["0.self_attention.linear_qkv", "1.self_attention.linear_qkv"],
        ),
        (
            [f"+{PEFT}.target_modules=['*.layers.1.*.linear_*']", f"+{PEFT}.exclude_modules=[linear_fc1]"],
            [f"1.{name}" for name in LAYER_0 if "fc1" not in name],
        ),
        (
            [*EXPERTS, f"+{PEFT}.exclude_modules=['*proj']"],
            ["0.self_attention.linear_qkv", "1.self_attention.linear_qkv"],
        ),
        (
            [*EXPERTS, f"+{PEFT}.target_modules=['*.layers.0.*linear_fc2']"],
            [f"0.mlp.experts.local_experts.{expert}.linear_fc2" for expert in range(4)],
        ),
    ],
)
def test_a_name_is_the_last_part_or_the_whole_with_wildcards(load, overrides, expected):
    assert names(load(ENABLED, *overrides)) == {f"decoder.layers.{name}" for name in expected}


def test_nothing_has_an_adapter_where_they_are_off(load):
    assert not names(load())


def test_gradients_and_optimizer_are_of_adapters_alone(load):
    whole = estimate_memory(load())["policy"]
    found = estimate_memory(load(ENABLED, f"+{PEFT}.dim=4", "loss_fn.reference_policy_kl_penalty=0.1"))
    adapters = found["policy"]
    # A [4, inputs] and B [outputs, 4] of four layers, twice.
    hidden, ffn = 64, 128
    of_layer = 4 * (hidden + 3 * hidden + 2 * hidden + hidden + 2 * ffn + ffn + hidden)
    assert adapters.rank_trained == 2 * of_layer
    assert adapters.rank_parameters == whole.rank_parameters + 2 * of_layer
    assert adapters.gradients == 4 * 2 * of_layer
    assert adapters.optimizer == 2 * 4 * 2 * of_layer / 2
    assert adapters.reference == 0
