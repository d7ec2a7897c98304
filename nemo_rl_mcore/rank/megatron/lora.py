"""Low-rank adapters (LoRA) beside Megatron's linear layers: alpha / dim * B A x is added to a layer's output.

An adapter is a module inside its layer, and adds its part in a forward hook: no module of Megatron is replaced, and no
weight renamed. Ranks cut an adapter as they cut its layer:

layer              A [dim, inputs]     B [outputs, dim]    between A and B
column-parallel    whole               part of outputs     gathered sequence, or the sum of its gradient
row-parallel       part of inputs      whole               sum over the ranks, scattered over the sequence
not cut, experts   whole               whole               nothing

A whole matrix is the same on all tensor-parallel ranks. Under sequence parallelism each rank applies it to its own
tokens, and a mark on the weight makes `finalize_model_grads` sum its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.utils import unwrap_model
from torch.nn.functional import dropout, linear, rms_norm

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.models.adapters import LORA_A, LORA_B
from nemo_rl_mcore.models.weights import Packing, Weight
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.model_class import modules_of
from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters

MODULE = "lora"
"""An adapter's name among its layer's modules."""


class Adapter(torch.nn.Module):
    """A and B beside this rank's part of `weight`; name: the linear layer's, in the whole model."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter

    def __init__(
        self,
        weight: Weight,
        name: str,
        policy: PolicyConfig,
        beside: torch.Tensor,
        own: Sequence[torch.Tensor],
    ):
        super().__init__()
        peft, megatron = policy.megatron_cfg.peft, policy.megatron_cfg
        self.weight, self.name, self.switched_on = weight, name, True
        self.scale = peft.alpha / peft.dim
        self._dropout, self._pre = peft.dropout, peft.dropout_position == "pre"
        self._dimension = None if weight.expert is not None else weight.slot.layout.dimension
        self._shares_sequences = megatron.sequence_parallel and weight.expert is None
        for what, tensor, axis in zip((LORA_A, LORA_B), own, (1, 0), strict=True):
            parameter = torch.nn.Parameter(tensor.to(beside.detach()))
            # Experts' gradients are reduced over different ranks than all other gradients.
            cast(Any, parameter).allreduce = getattr(beside, "allreduce", True)
            if weight.expert is not None or self._dimension == axis:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            else:
                cast(Any, parameter).sequence_parallel = self._shares_sequences
            self.register_parameter(what, parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the addition to the layer's output; inputs: the layer's, after its norm if it has one."""
        if self._pre:
            inputs = self._dropped(inputs, parts=self._dimension == 1)
        low: Any = linear(inputs, self.lora_A)
        shared = self._shares_sequences
        if self._dimension == 0:
            gather = gather_from_sequence_parallel_region if shared else copy_to_tensor_model_parallel_region
            low = gather(low)
        elif self._dimension == 1:
            sum_up = (
                reduce_scatter_to_sequence_parallel_region
                if shared
                else reduce_from_tensor_model_parallel_region
            )
            low = sum_up(low)
        output = linear(low, self.lora_B) * self.scale
        return output if self._pre else self._dropped(output, parts=self._dimension == 0)

    def _dropped(self, values: torch.Tensor, *, parts: bool) -> torch.Tensor:
        """Apply dropout; tensor-parallel ranks draw the same mask, unless each has `parts` of the values."""
        if not self.training or not self._dropout:
            return values
        context: Any = nullcontext()
        if self.weight.expert is not None:
            context = parallel_groups.rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif parts or self._shares_sequences:
            context = parallel_groups.rng_tracker().fork()
        with context:
            return dropout(values, self._dropout)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Add the adapter to this rank's part of the weight, in float32."""
        product = self.scale * (self.lora_B.detach().float() @ self.lora_A.detach().float())
        return (weight.float() + product).to(weight.dtype)


def add_adapter(layer: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, Any]) -> Any:
    adapter = cast(Adapter, layer.lora)
    if not adapter.switched_on:
        return outputs
    (hidden, *_), (output, bias) = inputs, outputs
    norm = getattr(layer, "layer_norm_weight", None)  # of Transformer Engine's fused layers
    if norm is not None:
        hidden = rms_norm(hidden, (hidden.shape[-1],), norm, layer.eps)
    return output + adapter(hidden), bias


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    adapters = modules_of(Adapter, chunks)
    for adapter in adapters:
        adapter.switched_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.switched_on = True


def adapter_state(chunks: Sequence[torch.nn.Module], policy: PolicyConfig) -> ShardedStateDict:
    """Return the adapters as ShardedTensors by chunk and name, which any layout can read.

    If a layer's output has several sections, each divided among the ranks, its B is stored by sections too.
    """
    gather_parameters(chunks)
    ranks, copy = parallel_groups.group("tensor"), parallel_groups.group("data_context").rank()
    copy_of_expert = cast(Any, parallel_state.get_expert_data_parallel_group()).rank()
    state: ShardedStateDict = {}
    for number, chunk in enumerate(chunks):
        of_chunk = state[str(number)] = dict[str, ShardedTensor | ShardedTensorFactory]()
        for module, adapter in cast(torch.nn.Module, unwrap_model(chunk)).named_modules():
            if not isinstance(adapter, Adapter):
                continue
            layout, of_expert = adapter.weight.slot.layout, adapter.weight.expert is not None
            for what, parameter, axis in ((LORA_A, adapter.lora_A, 1), (LORA_B, adapter.lora_B, 0)):
                cut = layout.dimension == axis and not of_expert
                replica = (0, 0 if cut or of_expert else ranks.rank(), copy_of_expert if of_expert else copy)
                offsets = ((axis, ranks.rank(), ranks.size()),) if cut else ()
                sizes: Sequence[int] = (parameter.shape[0],)
                if axis == 0 and layout.sections is not None:
                    sections = chain.from_iterable(layout.sections(policy.model))
                    sizes = [size // ranks.size() for size in sections]
                elif axis == 0 and layout.packing is Packing.JOINED:
                    sizes = (parameter.shape[0] // 2,) * 2
                key = f"{adapter.name}.{what}"
                of_chunk[f"{module}.{what}"] = _sharded(key, parameter, sizes, offsets, replica)
    return state


def _sharded(
    key: str,
    parameter: torch.Tensor,
    sizes: Sequence[int],
    offsets: tuple[tuple[int, int, int], ...],
    replica: tuple[int, int, int],
) -> ShardedTensor | ShardedTensorFactory:
    """Return a parameter; its sections of rows, of these sizes, are a tensor each in the checkpoint."""
    if len(sizes) == 1:
        return ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica)

    def build(key: str, whole: torch.Tensor, replica: Any, _flattened: object) -> Any:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{number}", part, *offsets, replica_id=replica)
            for number, part in enumerate(whole.split([*sizes]))
        ]

    return ShardedTensorFactory(key, parameter, build, cast(Any, torch.cat), replica)
