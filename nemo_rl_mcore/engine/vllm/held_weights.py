"""The weights of a vLLM model as Hugging Face tensors: which block of which tensor each parameter holds.

vLLM stacks tensors (q, k and v; gate and up; all experts of a layer), cuts them across processes and pads the
vocabulary. A class of layers that is not in the table below is not guessed at: its weights are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from nemo_rl_mcore.rank.refit.digests import HeldBlock, block_sum

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that read the experts' weights where and as they are loaded; others have rearranged copies."""


class UnreadableError(ValueError):
    """A parameter whose tensors are not known."""


@dataclass(frozen=True)
class Block:
    """The present values of a block of a Hugging Face tensor.

    shape: of the whole tensor. corner: row and column of it at which the block begins.
    """

    name: str
    values: torch.Tensor
    shape: tuple[int, ...]
    corner: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer: its own name in it, and the layer's name in the model.

    packed: what vLLM's stacked layers consist of, `packed_modules_mapping` of the model.
    """

    layer_name: str
    name: str
    values: torch.Tensor
    packed: Mapping[str, Sequence[str]]

    @property
    def full_name(self) -> str:
        """As the model calls it."""
        return f"{self.layer_name}.{self.name}"

    def whole(self) -> Block:
        """Return the tensor of the same name, all of it."""
        return Block(self.full_name, self.values, tuple(self.values.shape))

    def rows(self, name: str, values: torch.Tensor, shard: int, rows: int) -> Block:
        """Return a tensor's rows, cut evenly: `shard` counts this one, `rows` are those of the whole."""
        return Block(name, values, (rows, *values.shape[1:]), (shard * values.shape[0], 0))

    def part_names(self) -> list[str]:
        """Return what a stacked layer's tensors are called."""
        parent, _, own = self.layer_name.rpartition(".")
        if own not in self.packed:
            raise UnreadableError("packed_modules_mapping does not say what it consists of")
        return [f"{parent}.{part}.{self.name}" for part in self.packed[own]]


def blocks(model: Any) -> Iterator[Block]:
    """Yield the block that each parameter of a vLLM model holds here; shared ones come once.

    Raises UnreadableError, naming all the parameters that cannot be read and why, after the others.
    """
    shared: set[int] = set()
    refused: list[str] = []
    for layer_name, layer in model.named_modules():
        for name, values in layer.named_parameters(recurse=False):
            if id(values) in shared:
                continue
            shared.add(id(values))
            parameter = Parameter(layer_name, name, values.detach(), model.packed_modules_mapping)
            try:
                yield from _reader_of(layer)(layer, parameter)
            except UnreadableError as error:
                refused.append(f"{parameter.full_name} ({error})")
    if refused:
        raise UnreadableError(refused)


def held_blocks(model: Any) -> tuple[list[HeldBlock], list[str]]:
    """Return what a process of an engine holds, and the parameters that cannot be read, each with the reason."""
    found: list[tuple[Block, torch.Tensor]] = []
    refused: list[str] = []
    try:
        for block in blocks(model):
            row, column = block.corner
            found.append((block, block_sum(block.values, first_row=row, first_column=column)))
    except UnreadableError as error:
        [refused] = error.args
    totals = torch.stack([total for _, total in found]).tolist() if found else []
    return [_held(block, total) for (block, _), total in zip(found, totals, strict=True)], refused


def _held(block: Block, total: int) -> HeldBlock:
    columns = block.values.shape[-1] if block.values.ndim > 1 else 1
    size = block.values.numel() // max(1, columns), columns
    dtype = str(block.values.dtype).removeprefix("torch.")
    return HeldBlock(block.name, dtype, block.shape, block.corner, size, total)


def _replicated(_layer: Any, parameter: Parameter) -> Iterator[Block]:
    yield parameter.whole()


def _column_parallel(layer: Any, parameter: Parameter) -> Iterator[Block]:
    yield parameter.rows(parameter.full_name, parameter.values, layer.tp_rank, layer.output_size)


def _row_parallel(layer: Any, parameter: Parameter) -> Iterator[Block]:
    values = parameter.values
    if parameter.name == "bias":
        yield parameter.whole()
        return
    yield Block(
        parameter.full_name,
        values,
        (values.shape[0], layer.input_size),
        (0, layer.tp_rank * values.shape[1]),
    )


def _merged(layer: Any, parameter: Parameter) -> Iterator[Block]:
    names, sizes = parameter.part_names(), layer.output_sizes
    if len(names) != len(sizes):
        raise UnreadableError(f"{len(sizes)} parts, and packed_modules_mapping names {len(names)}")
    parts = parameter.values.split([size // layer.tp_size for size in sizes])
    for name, size, part in zip(names, sizes, parts, strict=True):
        yield parameter.rows(name, part, layer.tp_rank, size)


def _qkv(layer: Any, parameter: Parameter) -> Iterator[Block]:
    names = parameter.part_names()
    if len(names) != 3:
        raise UnreadableError(f"q, k and v, and packed_modules_mapping names {len(names)}")
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    total_heads = [layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads]
    shards = [layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2]
    head_sizes = [layer.head_size, layer.head_size, layer.v_head_size]
    parts = parameter.values.split([n * size for n, size in zip(heads, head_sizes, strict=True)])
    for name, part, shard, total, size in zip(names, parts, shards, total_heads, head_sizes, strict=True):
        yield parameter.rows(name, part, shard, total * size)


def _vocabulary(layer: Any, parameter: Parameter) -> Iterator[Block]:
    place = layer.shard_indices
    if layer.num_added_embeddings:
        raise UnreadableError("it has entries beside those of the vocabulary")
    values = parameter.values[: place.num_org_elements]
    shape = (layer.org_vocab_size, *values.shape[1:])
    yield Block(parameter.full_name, values, shape, (place.org_vocab_start_index, 0))


def _experts(layer: Any, parameter: Parameter) -> Iterator[Block]:
    """Of the experts that are here: w13 is gate above up, w2 is down; both are cut along the hidden units."""
    moe = layer.moe_config
    units = moe.intermediate_size_per_partition
    backend = layer.quant_method.unquantized_backend
    if backend not in _AS_LOADED:
        raise UnreadableError(f"the kernel {backend.value} reads rearranged weights")
    padded = (moe.intermediate_size_per_partition_unpadded, moe.hidden_dim_unpadded) != (
        units,
        moe.hidden_dim,
    )
    if padded or parameter.name not in ("w13_weight", "w2_weight"):
        raise UnreadableError("its layout is not known")
    shard, shards = moe.moe_parallel_config.tp_rank, moe.moe_parallel_config.tp_size
    parent = parameter.layer_name.removesuffix(".routed_experts")
    for expert, local in _local_experts(layer):
        values = parameter.values[local]
        name = f"{parent}.{expert}"
        if parameter.name == "w2_weight":
            corner = 0, shard * units
            yield Block(f"{name}.down_proj.weight", values, (moe.hidden_dim, units * shards), corner)
        else:
            for part, rows in zip(("gate_proj", "up_proj"), values.split(units), strict=True):
                yield parameter.rows(f"{name}.{part}.weight", rows, shard, units * shards)


def _local_experts(layer: Any) -> list[tuple[int, int]]:
    """Return each expert that is here: its number in the whole model, and its number here."""
    if layer.expert_map is None:
        return [(expert, expert) for expert in range(layer.local_num_experts)]
    return [(expert, local) for expert, local in enumerate(layer.expert_map.tolist()) if local >= 0]


def _unknown(layer: Any, _parameter: Parameter) -> Iterator[Block]:
    raise UnreadableError(f"what {type(layer).__name__} holds is not known")


_READERS: dict[type, Callable[[Any, Parameter], Iterator[Block]]] = {
    RMSNorm: _replicated,
    ReplicatedLinear: _replicated,
    GateLinear: _replicated,
    ColumnParallelLinear: _column_parallel,
    RowParallelLinear: _row_parallel,
    MergedColumnParallelLinear: _merged,
    QKVParallelLinear: _qkv,
    VocabParallelEmbedding: _vocabulary,
    ParallelLMHead: _vocabulary,
    RoutedExperts: _experts,
}


def _reader_of(layer: Any) -> Callable[[Any, Parameter], Iterator[Block]]:
    """Return the reader of this very class: a subclass may hold its weights otherwise."""
    return _READERS.get(type(layer), _unknown)
