"""The safetensors files of a Hugging Face folder: read slice by slice, written shard by shard."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_rl_mcore.data.hub import INDEX, ONE_FILE, tensor_files
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import activity

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_EXPONENT_OF_0 = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])


def packed_names(names: Collection[str]) -> Iterator[str]:
    """Yield the tensors that are there as blocks and scales."""
    for name in names:
        whole = name.removesuffix(_BLOCKS)
        if whole != name and whole + _SCALES in names:
            yield whole


def mxfp4_parts(name: str) -> tuple[str, str]:
    """Return what the blocks and the scales of a tensor are called."""
    return name + _BLOCKS, name + _SCALES


def mxfp4_shape(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor [E, 32 * G, R] for that of its blocks [E, R, G, 16]."""
    experts, outputs, groups, _ = blocks
    return experts, groups * _BLOCK, outputs


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, 32 * G, R] in bfloat16, which holds every such number.

    blocks: uint8 [E, R, G, 16]. scales: uint8 [E, R, G].
    """
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_OF_0
    values = torch.ldexp(_VALUES[codes.long()], exponents.unsqueeze(-1))
    return values.flatten(-2).transpose(-1, -2).to(torch.bfloat16)


_READABLE = ("F64", "F32", "F16", "BF16")


class TensorFiles:
    """The tensors of a folder by name; files are opened when first read, and closed on leaving the context.

    Tensors in MXFP4 (`..._blocks` and `..._scales`) are read as the one tensor that they make, in bfloat16.
    Raises ValueError for a folder without weights, for files that are missing or broken, and for unknown names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        self._file_of = tensor_files(folder)
        self._packed = frozenset(packed_names(self._file_of))

    @property
    def names(self) -> frozenset[str]:
        """Return all tensors."""
        parts = {part for name in self._packed for part in mxfp4_parts(name)}
        return frozenset(self._file_of) - parts | self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's."""
        if name in self._packed:
            return mxfp4_shape(self._slices(mxfp4_parts(name)[0]).get_shape())
        return tuple(self._slices(name).get_shape())

    def path_of(self, name: str) -> Path:
        """Return the file that holds the tensor."""
        return self._file_of[mxfp4_parts(name)[0] if name in self._packed else name]

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor; the rest is not read, but for other rows and columns of experts in MXFP4."""
        if name in self._packed:
            experts, *rest = part
            blocks, scales = (self._slices(one)[experts] for one in mxfp4_parts(name))
            return dequantized(blocks, scales)[(slice(None), *rest)]
        slices = self._slices(name)
        if slices.get_dtype() not in _READABLE:
            raise ValueError(
                f"{name} in {str(self._folder)!r} has the number format {slices.get_dtype()}; "
                f"{', '.join(_READABLE)} can be loaded"
            )
        return slices[part]

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        self._files.clear()
        self._open.close()

    def _slices(self, name: str) -> Any:
        path = self._file_of[name]
        try:
            return self._opened(path).get_slice(name)
        except SafetensorError as error:
            raise RefusedError(
                f"{str(path)!r} does not hold the tensor {name}: {error}", code="missing-tensors"
            ) from error

    def _opened(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise RefusedError(
                    f"{str(path)!r} cannot be read: {error}", code="unreadable-file"
                ) from error
        return self._files[path]


class ShardWriter:
    """Writes tensors, whose names and sizes are known before, to files of at most `shard_bytes` each (or one tensor).

    At most one shard is in memory.
    """

    def __init__(self, folder: Path, bytes_of: Mapping[str, int], shard_bytes: int) -> None:
        self._folder = folder
        self._shards = [*_shards(bytes_of, shard_bytes)]
        self._total = sum(bytes_of.values())
        self._written: dict[str, str] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._number = 0

    def ends_a_file(self, name: str) -> bool:
        """Return whether this tensor is the last of its file, which is written when it comes."""
        return any(shard[-1] == name for shard in self._shards)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor; they come in the order of the sizes."""
        self._pending[name] = tensor.to("cpu", copy=True)
        if list(self._pending) == self._shards[self._number]:
            file = self._name(self._number)
            activity.advance(f"writing {self._folder / file}")
            save_file(self._pending, self._folder / file, metadata={"format": "pt"})
            self._written |= dict.fromkeys(self._pending, file)
            self._pending, self._number = {}, self._number + 1

    def close(self) -> None:
        """Write the index; ValueError where tensors have not come."""
        missing = [name for shard in self._shards for name in shard if name not in self._written]
        if missing or self._pending:
            raise RefusedError(
                f"tensors are missing from the export: {missing[:8]} ({len(missing)} in all)",
                code="missing-tensors",
            )
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._written}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return ONE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _shards(bytes_of: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    names, size = list[str](), 0
    for name, more in bytes_of.items():
        if names and size + more > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names
