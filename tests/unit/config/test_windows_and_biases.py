"""Windows, sinks, biases of all projections and clamped gates, and what does not go with them."""

import pytest
from refusals import briefs

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.config.base import collect_problems

MODEL, MEGATRON = "policy.model", "policy.megatron_cfg"
GPT_OSS = (
    *(f"{MODEL}.num_layers=2", f"{MODEL}.softmax_type=learnable", f"{MODEL}.add_bias_linear=true"),
    *(f"{MODEL}.sliding_window=8", f"{MODEL}.window_attn_skip_freq=[1,0]"),
    *(f"{MODEL}.activation_func=quick_gelu", f"{MODEL}.activation_func_clamp_value=7.0"),
    *(f"{MODEL}.glu_linear_offset=1.0", f"{MODEL}.num_moe_experts=4"),
)
HYBRID_CLASS = f"{MEGATRON}.model_class=hybrid"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{MODEL}.window_attn_skip_freq=[1,0,1]"],
            f"{MODEL}.window_attn_skip_freq: not-allowed (num_layers)",
        ),
        (
            [f"{MODEL}.window_attn_skip_freq=[1,2]"],
            f"{MODEL}.window_attn_skip_freq: not-allowed (num_layers)",
        ),
        (
            [f"{MODEL}.window_attn_skip_freq=[0,0]"],
            f"{MODEL}.window_attn_skip_freq: contradicts (sliding_window)",
        ),
        ([f"{MODEL}.num_moe_experts=null"], f"{MODEL}.add_bias_linear: requires (num_moe_experts)"),
        ([f"{MODEL}.num_moe_experts=null"], f"{MODEL}.activation_func: requires (num_moe_experts)"),
        (
            [f"{MODEL}.moe_shared_expert_intermediate_size=8"],
            f"{MODEL}.add_bias_linear: requires (num_moe_experts)",
        ),
        ([f"{MODEL}.moe_layer_freq=[0,1]"], f"{MODEL}.activation_func: requires (num_moe_experts)"),
        ([f"{MODEL}.mtp_num_layers=1"], f"{MODEL}.softmax_type: incompatible (mtp_num_layers)"),
        ([f"{MODEL}.mtp_num_layers=1"], f"{MODEL}.sliding_window: incompatible (mtp_num_layers)"),
        *(
            ([HYBRID_CLASS], f"{MEGATRON}.model_class: incompatible ({key})")
            for key in ("softmax_type", "sliding_window", "add_bias_linear")
        ),
        (
            ["policy.generation.backend=vllm"],
            "policy.generation.backend: not-supported (num_moe_experts)",
        ),
        (
            ["cluster.gpus_per_node=2", f"{MEGATRON}.context_parallel_size=2"],
            f"{MEGATRON}.cp_comm_type: requires (context_parallel_size)",
        ),
    ],
)
def test_what_such_a_model_cannot_be_is_named(load, refusals, overrides, expected):
    load(*GPT_OSS)
    assert expected in refusals(*GPT_OSS, *overrides)


def test_ranks_on_cpus_share_sequences_beside_sinks(load):
    context = (
        *("cluster.cpu_workers_per_node=2", f"{MEGATRON}.context_parallel_size=2"),
        f"{MEGATRON}.use_fused_linear_logprobs=false",
    )
    assert load(*GPT_OSS, *context).policy.megatron_cfg.cp_comm_type == "p2p"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"activation_func_clamp_value": 7.0},
            "activation_func_clamp_value: has-no-effect (activation_func)",
        ),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset: has-no-effect (activation_func)"),
        (
            {"window_attn_skip_freq": (1, 0)},
            "window_attn_skip_freq: has-no-effect (sliding_window)",
        ),
    ],
)
def test_keys_of_what_is_not_there_have_no_effect(keys, expected):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    assert briefs(collect_problems(ModelConfig(**sizes, **keys))) == [expected]


def test_latents_have_no_exact_pairs(load):
    """YaRN of Megatron's latent attention rounds them."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    model = ModelConfig(**sizes, multi_latent_attention=True, qk_layernorm=True, rope_scaling=yarn)
    assert "rope_scaling.truncate: incompatible (multi_latent_attention)" in briefs(collect_problems(model))
