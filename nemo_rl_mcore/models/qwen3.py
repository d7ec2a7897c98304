"""Qwen 3: queries and keys are normalised per head."""

from nemo_rl_mcore.models.family import OUTPUT_BIAS, WINDOW_SWITCH, Family

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fields={"qk_layernorm": True},
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    refusals=(OUTPUT_BIAS, WINDOW_SWITCH),
)
