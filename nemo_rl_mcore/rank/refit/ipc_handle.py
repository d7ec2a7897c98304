"""A tensor on a GPU as another process opens it: torch's handle in plain fields, which need no pickle to travel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl_mcore.errors import RefusedError

_LONGEST = 4096
"""Bytes of a handle or of the name of a counter; CUDA's have 64."""
_KINDS = {"bytes": bytes, "int": int, "bool": bool}


@dataclass(frozen=True)
class IpcHandle:
    """A flat uint8 tensor of `tensor_size` bytes; the other fields are arguments of torch's `rebuild_cuda_tensor`."""

    tensor_size: int
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    @classmethod
    def of(cls, slot: torch.Tensor) -> Self:
        """Return the handle of a tensor of this process, which counts one receiver from then on."""
        assert slot.dtype is torch.uint8
        assert slot.is_contiguous()
        _, arguments = reduce_tensor(slot)
        given: dict[str, Any] = dict(zip(_parameters(), arguments, strict=True))
        given["tensor_size"] = slot.numel()
        return cls.from_message({field.name: given[field.name] for field in fields(cls)})

    @classmethod
    def from_message(cls, message: object) -> Self:
        """Return the handle that `to_message` told; raises ValueError for anything else."""
        names = {field.name: _KINDS[str(field.type)] for field in fields(cls)}
        if not isinstance(message, Mapping) or message.keys() != names.keys():
            raise RefusedError(f"a handle of GPU memory has the fields {', '.join(names)}", code="gpu-handle")
        for name, kind in names.items():
            value = message[name]
            if type(value) is not kind:
                raise RefusedError(
                    f"{name} of a handle of GPU memory is {type(value).__name__}, not {kind.__name__}",
                    code="gpu-handle",
                )
            if isinstance(value, bytes) and len(value) > _LONGEST:
                raise RefusedError(
                    f"{name} of a handle of GPU memory has {len(value)} bytes", code="gpu-handle"
                )
            if isinstance(value, int) and value < 0:
                raise RefusedError(f"{name} of a handle of GPU memory is {value}", code="gpu-handle")
        handle = cls(**message)
        if handle.tensor_offset + handle.tensor_size > handle.storage_size_bytes:
            raise RefusedError(
                "tensor_size of a handle of GPU memory is larger than its storage", code="gpu-handle"
            )
        return handle

    def to_message(self) -> dict[str, bytes | int | bool]:
        """Return the fields, for receivers that are not counted.

        torch would count one for each time that a process opens and closes the buffer; its counter is unsigned, and
        below zero it keeps the memory for ever.
        """
        return asdict(self) | {"ref_counter_handle": b"/uncounted"}

    def open(self, device: torch.device) -> torch.Tensor:
        """Return the tensor, on what this process calls the device."""
        given = asdict(self) | {
            "tensor_cls": torch.Tensor,
            "tensor_size": (self.tensor_size,),
            "tensor_stride": (1,),
            "storage_cls": torch.TypedStorage,
            "dtype": torch.uint8,
            "storage_device": device.index,
            "requires_grad": False,
        }
        return rebuild_cuda_tensor(**{name: given[name] for name in _parameters()})

    def release(self, device: torch.device) -> None:
        """Count one receiver less, in the process that made the handle."""
        torch.TypedStorage._release_ipc_counter(
            self.ref_counter_handle, self.ref_counter_offset, device=device
        )


def _parameters() -> tuple[str, ...]:
    return tuple(inspect.signature(rebuild_cuda_tensor).parameters)
