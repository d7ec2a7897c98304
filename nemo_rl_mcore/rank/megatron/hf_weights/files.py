"""The safetensors files of a Hugging Face folder: read slice by slice, written shard by shard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [E, 32 * G, R], exact, for blocks uint8 [E, R, G, 16] and scales uint8 [E, R, G]."""
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_OF_0
    values = torch.ldexp(_VALUES[codes.long()], exponents.unsqueeze(-1))
    return values.flatten(-2).transpose(-1, -2).to(torch.bfloat16)


_READABLE = ("F64", "F32", "F16", "BF16")


class TensorFiles(ExitStack):
    """The tensors of a folder by name; MXFP4 (`..._blocks` and `..._scales`) is read as one tensor, in bfloat16.

    Raises ValueError for a folder without weights, for files that are missing or broken, and for unknown names.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._file_of = tensor_files(folder)
        # Blocks and scales of each tensor that is there as these.
        self._packed = {
            name.removesuffix(_BLOCKS): (name, name.removesuffix(_BLOCKS) + _SCALES)
            for name in self._file_of
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in self._file_of
        }
        parts = {part for both in self._packed.values() for part in both}
        self.names = frozenset(self._file_of) - parts | self._packed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's: [E, 32 * G, R] for blocks [E, R, G, 16]."""
        if name not in self._packed:
            return tuple(self._slices(name).get_shape())
        experts, outputs, groups, _ = self._slices(self._packed[name][0]).get_shape()
        return experts, groups * _BLOCK, outputs

    def path_of(self, name: str) -> Path:
        return self._file_of[self._packed[name][0] if name in self._packed else name]

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor; the rest is not read, but for other rows and columns of experts in MXFP4."""
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
    """Writes tensors in order to files of at most `shard_bytes` each (or one tensor), one of them in memory."""

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
        """Take the next tensor; they come in the order of the sizes, and the last of a file's has it written."""
        self._pending[name] = tensor.to("cpu", copy=True)
        if list(self._pending) == self._shards[self._number]:
            self._number, count = self._number + 1, len(self._shards)
            file = ONE_FILE if count == 1 else f"model-{self._number:05d}-of-{count:05d}.safetensors"
            activity.advance(f"writing {self._folder / file}")
            save_file(self._pending, self._folder / file, metadata={"format": "pt"})
            self._written |= dict.fromkeys(self._pending, file)
            self._pending = {}

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
