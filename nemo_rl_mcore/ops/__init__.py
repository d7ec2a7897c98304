"""Kernels in pure torch: tensors and a process group in, tensors out. `docs/fused_logprobs.md` describes them."""
