"""Read a Hugging Face folder's tensors in slices, pack them into Megatron's parameters, unpack them and write shards.

A rank holds an equal part of each tensor, along one dimension, and its parameter is these parts packed together. So
loading cuts, then packs; exporting unpacks on each rank, then joins the parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.data.hub import INDEX, ONE_FILE, tensor_files
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models import layer_slots, outside_of_layers
from nemo_rl_mcore.models.weights import Layout, Packing, Slot, Stored, Weight
from nemo_rl_mcore.rank import activity

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# megatron-core 0.20 has another name for the layer inside.
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.+)")
_OF_COLUMNS = (Packing.TRANSPOSED, Packing.INTERLEAVED)
"""Packings of matrices whose rows are a tensor's columns."""

Parts = Sequence[torch.Tensor]


def find_weight(name: str, layers: Sequence[int], first_expert: int, model: ModelConfig) -> Weight:
    """Return the weight of a parameter of this rank's stage; RefusedError for an unknown name.

    layers, first_expert: the numbers, in the whole model, of the stage's layers and of this rank's first expert.
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
        # [q], [k], [v] to [q..q, k, v] for each query group; rows of weights, or entries of biases. With output gates
        # [q, gate] of each head to [q..q, gate..gate, k, v].
        size, rest = model.shape.head_dim, parts[0].shape[1:]
        groups, kinds = parts[1].shape[0] // size, 1 if model.linear_attention_freq is None else 2
        queries = parts[0].reshape(groups, -1, kinds, size, *rest).transpose(1, 2).flatten(1, 2)
        shared = [part.reshape(groups, 1, size, *rest) for part in parts[1:]]
        return torch.cat([queries, *shared], dim=1).reshape(-1, *rest)
    if packing is Packing.JOINED:
        return torch.cat([*parts])
    (part,) = parts
    if packing in _OF_COLUMNS and part.ndim > 1:
        part = part.T
    if packing is Packing.INTERLEAVED:
        return torch.cat([part[0::2], part[1::2]])
    return part


def unpack(packing: Packing, parameter: torch.Tensor, model: ModelConfig) -> Parts:
    if packing is Packing.QKV:
        heads, rest = model.num_attention_heads // model.shape.query_groups, parameter.shape[1:]
        kinds, size = 1 if model.linear_attention_freq is None else 2, model.shape.head_dim
        grouped = parameter.reshape(-1, kinds * heads + 2, size, *rest)
        queries, *shared = grouped.split([kinds * heads, 1, 1], dim=1)
        queries = queries.reshape(-1, kinds, heads, size, *rest).transpose(1, 2)
        return [part.reshape(-1, *rest) for part in (queries, *shared)]
    if packing is Packing.JOINED:
        return parameter.chunk(2)
    if packing is Packing.INTERLEAVED:
        parameter = torch.stack(parameter.chunk(2), dim=1).flatten(0, 1)
    return (parameter.T if packing in _OF_COLUMNS and parameter.ndim > 1 else parameter,)


def whole(
    layout: Layout, shards: Parts, shapes: Sequence[Sequence[int]], model: ModelConfig
) -> list[torch.Tensor]:
    """Return the whole tensors, from all ranks' parameters, without padding rows."""
    if layout.sections is not None:
        # Each rank has a share of each section of each tensor, along the first dimension.
        sizes = [size // len(shards) for of_tensor in layout.sections(model) for size in of_tensor]
        shares = [shard.split(sizes) for shard in shards]
        joined = torch.cat([share for section in zip(*shares, strict=True) for share in section])
        return [tensor.contiguous() for tensor in joined.split([shape[0] for shape in shapes])]
    if layout.packing is Packing.QKV and len(shards) > model.shape.query_groups:
        shards = [torch.cat([*shards])]  # pieces of query groups
    parts_of_ranks = [unpack(layout.packing, shard, model) for shard in shards]
    if layout.dimension is None or len(shards) == 1:
        tensors = [*parts_of_ranks[0]]
    else:
        tensors = [torch.cat(parts, layout.dimension) for parts in zip(*parts_of_ranks, strict=True)]
    return [tensor[: shape[0]].contiguous() for tensor, shape in zip(tensors, shapes, strict=True)]


_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_EXPONENT_OF_0 = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [E, 32 * G, R], exact, for blocks uint8 [E, R, G, 16] and scales uint8 [E, R, G]."""
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_OF_0
    values = torch.ldexp(_VALUES[codes.long()], exponents.unsqueeze(-1))
    return values.flatten(-2).transpose(-1, -2).to(torch.bfloat16)


_READABLE = ("F64", "F32", "F16", "BF16")


class TensorFiles(ExitStack):
    """A folder's tensors by name; MXFP4 (`..._blocks` and `..._scales`) is read as one bfloat16 tensor.

    stored: a family's names for tensors that files store in another form.
    Raises ValueError for a folder without weights, for files that are missing or broken, and for unknown names.
    """

    def __init__(self, folder: Path, stored: Stored | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._file_of = tensor_files(folder)
        # Names of the blocks and scales of each tensor in MXFP4.
        self._packed = {
            name.removesuffix(_BLOCKS): (name, name.removesuffix(_BLOCKS) + _SCALES)
            for name in self._file_of
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in self._file_of
        }
        parts = {part for both in self._packed.values() for part in both}
        self.names = frozenset(self._file_of) - parts | self._packed.keys()
        self._places: dict[str, tuple[str, int | None, slice]] = {}
        if stored is not None:
            for name in self.names:
                inside = stored(name, lambda name=name: self.shape(name))
                self._places |= {own: (name, *place) for own, place in inside.items()}
            self.names = frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape: [E, 32 * G, R] for blocks [E, R, G, 16]."""
        if name in self._places:
            name, expert, rows = self._places[name]
            shape = tuple(self._slices(name).get_shape())
            return shape if expert is None else (rows.stop - rows.start, *shape[2:])
        if name not in self._packed:
            return tuple(self._slices(name).get_shape())
        experts, outputs, groups, _ = self._slices(self._packed[name][0]).get_shape()
        return experts, groups * _BLOCK, outputs

    def require_finite(self, name: str) -> None:
        """Raise RefusedError, naming the tensor, if an entry is not finite."""
        values = self.read(name, (slice(None),) * len(self.shape(name)))
        wrong = values[~torch.isfinite(values)]
        if len(wrong):
            stored = self._places[name][0] if name in self._places else name
            path = self._file_of[self._packed[name][0] if name in self._packed else stored]
            raise RefusedError(
                f"{str(path)!r}: {name} holds {float(wrong[0])}; {len(wrong)} of its "
                f"{values.numel()} weights are not finite; fetch or export the model again",
                code="not-finite-weights",
            )

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of a tensor; in MXFP4 whole experts are read."""
        if name in self._places:
            name, expert, rows = self._places[name]
            if expert is not None:
                first, end, _ = part[0].indices(rows.stop - rows.start)
                own = slice(rows.start + first, rows.start + end), *part[1:]
                return self.read(name, (slice(expert, expert + 1), *own))[0]
        if name in self._packed:
            experts, *rest = part
            blocks, scales = (self._slices(one)[experts] for one in self._packed[name])
            return dequantized(blocks, scales)[(slice(None), *rest)]
        slices = self._slices(name)
        if slices.get_dtype() not in _READABLE:
            raise ValueError(
                f"{name} in {str(self._folder)!r} has the number format {slices.get_dtype()}; "
                f"{', '.join(_READABLE)} can be loaded"
            )
        return slices[part]

    def _slices(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._files:
            try:
                self._files[path] = self.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise RefusedError(
                    f"{str(path)!r} cannot be read: {error}", code="unreadable-file"
                ) from error
        try:
            return self._files[path].get_slice(name)
        except SafetensorError as error:
            raise RefusedError(
                f"{str(path)!r} does not hold the tensor {name}: {error}", code="missing-tensors"
            ) from error


class ShardWriter:
    """Writes tensors to files of at most `shard_bytes` or one tensor each, and keeps one file in memory."""

    def __init__(self, folder: Path, bytes_of: Mapping[str, int], shard_bytes: int) -> None:
        self._folder = folder
        self._shards = [list[str]()]
        size = 0
        for name, more in bytes_of.items():
            if self._shards[-1] and size + more > shard_bytes:
                self._shards.append([])
                size = 0
            self._shards[-1].append(name)
            size += more
        self.ends_of_files = {shard[-1] for shard in self._shards if shard}
        self._total = sum(bytes_of.values())
        self._written: dict[str, str] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._number = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor, in the order of `bytes_of`; a file's last tensor writes the file."""
        self._pending[name] = tensor.to("cpu", copy=True)
        if list(self._pending) == self._shards[self._number]:
            self._number, count = self._number + 1, len(self._shards)
            file = ONE_FILE if count == 1 else f"model-{self._number:05d}-of-{count:05d}.safetensors"
            activity.advance(f"writing {self._folder / file}")
            save_file(self._pending, self._folder / file, metadata={"format": "pt"})
            self._written |= dict.fromkeys(self._pending, file)
            self._pending = {}

    def close(self) -> None:
        """Write the index; RefusedError if tensors are missing."""
        missing = [name for shard in self._shards for name in shard if name not in self._written]
        if missing or self._pending:
            raise RefusedError(
                f"tensors are missing from the export: {missing[:8]} ({len(missing)} in all)",
                code="missing-tensors",
            )
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._written}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
