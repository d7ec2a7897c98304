"""Llama: the plain decoder that the other families vary."""

from nemo_rl_mcore.models.family import MLP_BIAS, OUTPUT_BIAS, Family

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    refusals=(OUTPUT_BIAS, MLP_BIAS),
)
