"""Tensors of a Hugging Face model packed into a parameter of Megatron and unpacked from it.

A rank holds an equal part of each tensor, along one dimension; its parameter is those parts packed into one. So
loading is: cut, then pack; exporting: unpack on each rank, then put the parts together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import layer_slots, outside_of_layers
from nemo_rl_mcore.models.weights import Layout, Packing, Slot, Weight

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# megatron-core 0.20 names the layer inside otherwise.
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.+)")
_OF_COLUMNS = (Packing.TRANSPOSED, Packing.INTERLEAVED)
"""Packings of matrices whose rows are the columns of a tensor."""

Parts = Sequence[torch.Tensor]


def find_weight(name: str, layers: Sequence[int], first_expert: int, model: ModelConfig) -> Weight:
    """Return the weight behind a parameter of one rank's stage; RefusedError for an unknown one.

    layers: the numbers, over the whole model, of the stage's layers. first_expert: that of this rank's first expert.
    """
    outside = outside_of_layers(model)
    slots: Sequence[Slot] = outside
    layer, own_name = None, name
    if inside := _LAYER.fullmatch(name):
        layer, own_name = layers[int(inside[1])], inside[2]
    elif inside := _PREDICTION.fullmatch(name):
        layer, own_name = model.num_layers + int(inside[1]), inside[2]
    if layer is not None:
        slots = layer_slots(model, layer)
    for slot in slots:
        if (match := re.fullmatch(slot.megatron, own_name)) is None:
            continue
        if slot is outside.output and model.tie_word_embeddings:
            slot = outside.embedding  # the last pipeline stage's copy
        numbers = [int(number) for number in match.groups() if number is not None]
        return Weight(slot, layer, first_expert + numbers[0] if numbers else None)
    raise RefusedError(
        f"no Hugging Face tensor is known for Megatron's parameter {name!r}", code="unknown-parameter"
    )


def pack(packing: Packing, parts: Parts, model: ModelConfig) -> torch.Tensor:
    if packing is Packing.QKV:
        # [q], [k], [v] to [q..q, k, v] for each query group; rows of weights, or entries of biases.
        groups, rest = parts[1].shape[0] // model.head_dim, parts[0].shape[1:]
        grouped = torch.cat([part.reshape(groups, -1, model.head_dim, *rest) for part in parts], dim=1)
        return grouped.reshape(-1, *rest)
    if packing is Packing.GATED:
        return torch.cat([*parts])
    (part,) = parts
    if packing in _OF_COLUMNS and part.ndim > 1:
        part = part.T
    if packing is Packing.INTERLEAVED:
        return torch.cat([part[0::2], part[1::2]])
    return part


def unpack(packing: Packing, parameter: torch.Tensor, model: ModelConfig) -> Parts:
    if packing is Packing.QKV:
        queries, rest = model.num_attention_heads // model.query_groups, parameter.shape[1:]
        grouped = parameter.reshape(-1, queries + 2, model.head_dim, *rest)
        return [part.reshape(-1, *rest) for part in grouped.split([queries, 1, 1], dim=1)]
    if packing is Packing.GATED:
        return parameter.chunk(2)
    if packing is Packing.INTERLEAVED:
        parameter = torch.stack(parameter.chunk(2), dim=1).flatten(0, 1)
    return (parameter.T if packing in _OF_COLUMNS and parameter.ndim > 1 else parameter,)


def whole(
    layout: Layout, shards: Parts, shapes: Sequence[Sequence[int]], model: ModelConfig
) -> list[torch.Tensor]:
    """Return the tensors of those shapes, from the parameters of all ranks, without padding rows."""
    if layout.sections is not None and len(shards) > 1:
        # Each rank has a share of each section, along the first dimension.
        sections = layout.sections(model)
        shares = [shard.split([size // len(shards) for size in sections]) for shard in shards]
        return [torch.cat([share for section in zip(*shares, strict=True) for share in section])]
    parts_of_ranks = [unpack(layout.packing, shard, model) for shard in shards]
    if layout.dimension is None or len(shards) == 1:
        tensors = [*parts_of_ranks[0]]
    else:
        tensors = [torch.cat(parts, layout.dimension) for parts in zip(*parts_of_ranks, strict=True)]
    return [tensor[: shape[0]].contiguous() for tensor, shape in zip(tensors, shapes, strict=True)]
