"""Mistral: a Llama, where its window is off."""

from nemo_rl_mcore.models.family import WINDOW, Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
    refusals=(WINDOW,),
)
