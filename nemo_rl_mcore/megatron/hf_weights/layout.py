"""How tensors of a Hugging Face model lie in a Megatron parameter, and how tensor-parallel ranks cut both.

A rank holds an equal part of each Hugging Face tensor, along one dimension; its parameter is those parts packed into
one. So loading is: cut, then pack; exporting: unpack on each rank, then put the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.config import ModelConfig

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """`dimension` is the one that ranks cut, None where each rank holds the whole."""

    dimension: int | None
    pack: Callable[[Parts, ModelConfig], torch.Tensor]
    unpack: Callable[[torch.Tensor, ModelConfig], Parts]

    def cut(self, shape: Sequence[int], rank: int, ranks: int) -> tuple[slice, ...]:
        """Return the part of a tensor of that shape that a rank holds; the last ones are smaller where it is uneven."""
        if self.dimension is None:
            return tuple(slice(0, size) for size in shape)
        size = shape[self.dimension]
        share = -(-size // ranks)
        begin, end = min(rank * share, size), min((rank + 1) * share, size)
        return tuple(
            slice(begin, end) if dimension == self.dimension else slice(0, length)
            for dimension, length in enumerate(shape)
        )

    def whole(self, shards: Parts, shapes: Sequence[Sequence[int]], model: ModelConfig) -> list[torch.Tensor]:
        """Return the Hugging Face tensors of those shapes, from the parameters of all ranks, without padding rows."""
        parts_of_ranks = [self.unpack(shard, model) for shard in shards]
        if self.dimension is None or len(shards) == 1:
            tensors = [*parts_of_ranks[0]]
        else:
            tensors = [torch.cat(parts, self.dimension) for parts in zip(*parts_of_ranks, strict=True)]
        return [tensor[: shape[0]].contiguous() for tensor, shape in zip(tensors, shapes, strict=True)]


def _pack_one(parts: Parts, _model: ModelConfig) -> torch.Tensor:
    (part,) = parts
    return part


def _unpack_one(tensor: torch.Tensor, _model: ModelConfig) -> Parts:
    return (tensor,)


def _pack_qkv(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """[q], [k], [v] to [q..q, k, v] for each query group; rows of weights, or entries of biases."""
    groups, rest = parts[1].shape[0] // model.head_dim, parts[0].shape[1:]
    grouped = torch.cat([part.reshape(groups, -1, model.head_dim, *rest) for part in parts], dim=1)
    return grouped.reshape(-1, *rest)


def _unpack_qkv(tensor: torch.Tensor, model: ModelConfig) -> Parts:
    queries, rest = model.num_attention_heads // model.query_groups, tensor.shape[1:]
    grouped = tensor.reshape(-1, queries + 2, model.head_dim, *rest)
    return [part.reshape(-1, *rest) for part in grouped.split([queries, 1, 1], dim=1)]


def _pack_gated(parts: Parts, _model: ModelConfig) -> torch.Tensor:
    return torch.cat([*parts])


def _unpack_gated(tensor: torch.Tensor, _model: ModelConfig) -> Parts:
    return tensor.chunk(2)


REPLICATED = Layout(None, _pack_one, _unpack_one)
ROWS = Layout(0, _pack_one, _unpack_one)
COLUMNS = Layout(1, _pack_one, _unpack_one)
QKV = Layout(0, _pack_qkv, _unpack_qkv)
GATED = Layout(0, _pack_gated, _unpack_gated)
