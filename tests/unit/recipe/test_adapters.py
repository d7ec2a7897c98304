"""Adapters in a recipe: which layers a name is, what is refused at load, what `check` counts."""

import pytest
from refusals import briefs

from nemo_rl_mcore.config import ConfigError
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
        ([], {f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LAYER_0}),
        (
            [f"+{PEFT}.target_modules=[linear_qkv]"],
            {f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in (0, 1)},
        ),
        (
            [f"+{PEFT}.target_modules=['*.layers.1.*.linear_*']", f"+{PEFT}.exclude_modules=[linear_fc1]"],
            {f"decoder.layers.1.{name}" for name in LAYER_0 if "fc1" not in name},
        ),
        (
            [*EXPERTS, f"+{PEFT}.exclude_modules=['*proj']"],
            {f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in (0, 1)},
        ),
        (
            [*EXPERTS, f"+{PEFT}.target_modules=['*.layers.0.*linear_fc2']"],
            {f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc2" for expert in range(4)},
        ),
    ],
)
def test_a_name_is_the_last_part_or_the_whole_with_wildcards(load, overrides, expected):
    assert names(load(ENABLED, *overrides)) == expected


def test_nothing_has_an_adapter_where_they_are_off(load):
    assert not names(load())


@pytest.mark.parametrize(
    ("overrides", "brief"),
    [
        ([f"+{PEFT}.target_modules=[q_proj]"], f"{PEFT}.target_modules.0: not-found (model)"),
        ([f"+{PEFT}.target_modules=[linear_*]"], f"{PEFT}.target_modules.0: not-found (model)"),
        ([f"+{PEFT}.exclude_modules=[output_layer]"], f"{PEFT}.exclude_modules.0: not-found (model)"),
        ([f"+{PEFT}.exclude_modules=['*']"], f"{PEFT}.exclude_modules: no-signal (target_modules)"),
        ([f"+{PEFT}.lora_dtype=bfloat16"], f"{PEFT}.lora_dtype: not-supported (precision)"),
        (["policy.model.mtp_num_layers=1"], f"{PEFT}.enabled: not-supported (mtp_num_layers)"),
        (
            [f"+{PEFT}.lora_A_init_method=zero"],
            f"{PEFT}.lora_A_init_method: no-signal (lora_B_init_method)",
        ),
        (
            [
                *EXPERTS,
                f"+{PEFT}.target_modules=[linear_fc1]",
                "policy.megatron_cfg.transformer_impl=transformer_engine",
            ],
            f"{PEFT}.target_modules: not-supported (exclude_modules)",
        ),
    ],
)
def test_what_is_refused(load, overrides, brief):
    with pytest.raises(ConfigError) as caught:
        load(ENABLED, *overrides)
    assert brief in briefs(caught.value.problems)


def test_the_spelling_of_nemo_rl_for_no_format_of_their_own(load):
    assert load(ENABLED, f"+{PEFT}.lora_dtype='None'").policy.megatron_cfg.peft.enabled


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
