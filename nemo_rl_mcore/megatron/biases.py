"""What sums and norms of gradients over tensor-parallel ranks have to know of sinks and of experts' biases."""

from __future__ import annotations

import re

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

_SINKS = re.compile(r".+\.core_attention\.softmax_offset")
_BIASES = re.compile(r".+\.mlp\.experts\..+\.bias\d*")


def mark_for_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark sinks as cut by ranks, and biases of experts as whole.

    Unmarked, the norm of gradients has the sinks of one rank alone (tensor_parallel/layers.py,
    param_is_not_tensor_parallel_duplicate). And upstream adds up the gradients of experts' biases over the ranks that
    share tokens (RowParallelLinear marks them under sequence parallelism), which hold other experts, or the same sums.
    """
    for name, parameter in model.named_parameters():
        if _SINKS.fullmatch(name) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif _BIASES.fullmatch(name):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
