"""Weights on their way to an engine: tensors packed one after another into a buffer of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

_ALIGNMENT = 64
"""Bytes that each tensor starts at a multiple of, so that every dtype can be viewed in place."""


@dataclass(frozen=True)
class PackedTensor:
    """Where a tensor lies in its bucket's buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as a view of the buffer (uint8)."""
        dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        return buffer[self.offset : self.offset + count * dtype.itemsize].view(dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A filled buffer as its receiver is told of it: where it is, in the words of its transport, and what it holds."""

    location: dict[str, Any]
    tensors: tuple[PackedTensor, ...]

    def to_message(self) -> dict[str, Any]:
        """Return plain data, which every serializer between the processes takes."""
        return {"location": self.location, "tensors": [asdict(tensor) for tensor in self.tensors]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Undo `to_message`."""
        tensors = (
            PackedTensor(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), tensor["offset"])
            for tensor in message["tensors"]
        )
        return cls(message["location"], tuple(tensors))

    def read(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each, as views of the buffer."""
        for tensor in self.tensors:
            yield tensor.name, tensor.read(buffer)


class Packer:
    """Fills one buffer (uint8 [bytes])."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._tensors: list[PackedTensor] = []
        self.used = 0
        """Bytes taken so far."""

    @property
    def tensors(self) -> Sequence[PackedTensor]:
        """Return what the buffer holds."""
        return tuple(self._tensors)

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor after those before it; false, with nothing changed, when it does not fit."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        if end > self._buffer.numel():
            return False
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed = PackedTensor(name, dtype, tuple(tensor.shape), start)
        packed.read(self._buffer).copy_(tensor)
        self._tensors.append(packed)
        self.used = end
        return True

    def clear(self) -> None:
        """Start again at the front."""
        self._tensors.clear()
        self.used = 0
