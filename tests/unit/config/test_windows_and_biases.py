"""Windows, sinks, biases of all projections and clamped gates, and what does not go with them."""

from refusals import briefs

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.config.base import collect_problems

MODEL, MEGATRON = "policy.model", "policy.megatron_cfg"
GPT_OSS = (
    *(f"{MODEL}.num_layers=2", f"{MODEL}.softmax_type=learnable", f"{MODEL}.add_bias_linear=true"),
    f"{MODEL}.sliding_window=8",
    *(f"{MODEL}.activation_func=quick_gelu", f"{MODEL}.activation_func_clamp_value=7.0"),
    f"{MODEL}.num_moe_experts=4",
)


def test_ranks_on_cpus_share_sequences_beside_sinks(load):
    context = (
        *("cluster.cpu_workers_per_node=2", f"{MEGATRON}.context_parallel_size=2"),
        f"{MEGATRON}.use_fused_linear_logprobs=false",
    )
    assert load(*GPT_OSS, *context).policy.megatron_cfg.context_parallel_size == 2


def test_latents_have_no_exact_pairs(load):
    """YaRN of Megatron's latent attention rounds them."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    model = ModelConfig(**sizes, kv_lora_rank=12, qk_layernorm=True, rope_scaling=yarn)
    assert "rope_scaling.truncate: incompatible (kv_lora_rank)" in briefs(collect_problems(model))
