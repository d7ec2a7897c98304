"""Experts with biases, of local modules, and what tensor-parallel ranks have to know of those and of sinks."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

_SINKS = re.compile(r".+\.core_attention\.softmax_offset")
_BIASES = re.compile(r".+\.mlp\.experts\..+\.bias\d*")


class ExpertOutput(RowParallelLinear):
    """Upstream's product, whose result may be added to in place.

    MLP.forward adds an expert's bias so, and the result of upstream's is a view that autograd lets nobody change.
    """

    def forward(self, input_: torch.Tensor) -> Any:
        """See upstream: [T, H] for [T, F], and the bias [H]."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def biased_experts() -> Any:
    """Return what Megatron builds experts and their router of: local modules, one for each expert."""
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput)
    experts = partial(SequentialMLP, submodules=parts)
    return partial(MoELayer, submodules=MoESubmodules(experts=experts))


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
