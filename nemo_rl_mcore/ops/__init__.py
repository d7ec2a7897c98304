"""Kernels in pure torch: tensors and a process group in, tensors out. `docs/fused_logprobs.md` describes them."""

from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs, linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import IndexedLogprobs, linear_logprobs_at
from nemo_rl_mcore.ops.linear_topk import TopK, linear_topk_logprobs
from nemo_rl_mcore.ops.sampling import SamplingParams, sample_tokens
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs

__all__ = [
    "IndexedLogprobs",
    "LinearLogprobsOptions",
    "SamplingParams",
    "TopK",
    "fused_linear_logprobs",
    "linear_logprobs",
    "linear_logprobs_at",
    "linear_topk_logprobs",
    "sample_tokens",
    "vocab_parallel_logprobs",
]
