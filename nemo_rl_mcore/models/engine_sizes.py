"""Bytes that an engine gets: a bucket of weights on their way to it, and vLLM's key-value cache on CPU."""

from math import prod

from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import all_weights

_BYTES = {"float32": 4, "bfloat16": 2}
_BUCKET_BYTES = 64 << 20
_CPU_CACHE_SEQUENCES = 64
"""Sequences of full length that the key-value cache on CPU has room for by default; more wait their turn."""


def largest_weight_bytes(policy: PolicyConfig) -> int:
    """Return the bytes of the largest tensor that a refit sends."""
    largest = max(
        prod(shape)
        for weight in all_weights(policy.model)
        for shape in weight.slot.tensor_shapes(policy.model)
    )
    return largest * _BYTES[policy.precision]


def refit_bucket_bytes(policy: PolicyConfig) -> int:
    """Size of each of the two buffers of weights on their way: 64 MiB, and in any case the largest tensor."""
    return max(_BUCKET_BYTES, largest_weight_bytes(policy))


def cpu_cache_bytes(policy: PolicyConfig) -> int:
    """Size of the key-value cache on CPU, unless vllm_kwargs says another."""
    vllm, model = policy.generation.vllm_cfg, policy.model
    block = 128  # tokens; the cache is cut into whole blocks
    length = -(-(vllm.max_model_len or policy.max_total_sequence_length) // block) * block
    token = (
        2
        * model.num_layers
        * model.query_groups
        * model.head_dim
        * _BYTES[vllm.number_format(policy.precision) or policy.precision]
    )
    return _CPU_CACHE_SEQUENCES * length * token
