"""Qwen 2 and 2.5: queries, keys and values have a bias."""

from nemo_rl_mcore.models.family import WINDOW_SWITCH, Family

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fields={"add_qkv_bias": True},
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    refusals=(WINDOW_SWITCH,),
)
