"""Sending ends of the transports for packed tensors; the receiving ends are in `engine.receivers`.

A sending end owns the slots: one is filled while the engines read the other. A receiving end finds a slot by its
bucket's `location`.
"""

from __future__ import annotations

import inspect
import mmap
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl_mcore.rank import accelerator, rendezvous

_ALIGNMENT = 64
"""Alignment of each tensor in bytes, so that every dtype can be viewed in place."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's position in its bucket's buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the buffer, uint8."""
        dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        return buffer[self.offset : self.offset + count * dtype.itemsize].view(dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A filled buffer's description for the receiver: its location, in the transport's terms, and its tensors."""

    location: dict[str, Any]
    tensors: tuple[PackedTensor, ...]

    def to_message(self) -> dict[str, Any]:
        return {"location": self.location, "tensors": [asdict(tensor) for tensor in self.tensors]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        tensors = (PackedTensor(**{**one, "shape": tuple(one["shape"])}) for one in message["tensors"])
        return cls(message["location"], tuple(tensors))

    def read(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            yield tensor.name, tensor.read(buffer)


@dataclass
class Packer:
    """Fills one buffer, uint8 [bytes]; used: number of bytes so far."""

    buffer: torch.Tensor
    tensors: tuple[PackedTensor, ...] = ()
    used: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Append a copy of a tensor; returns False, with nothing changed, if it does not fit."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        if end > self.buffer.numel():
            return False
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed = PackedTensor(name, dtype, tuple(tensor.shape), start)
        packed.read(self.buffer).copy_(tensor)
        self.tensors, self.used = (*self.tensors, packed), end
        return True


_IPC_ARGUMENTS = tuple(inspect.signature(rebuild_cuda_tensor).parameters)


@dataclass(frozen=True)
class IpcHandle:
    """torch's IPC handle as plain fields, without pickle: another process uses it to open a tensor as flat uint8."""

    tensor_size: int
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    def to_message(self) -> dict[str, bytes | int | bool]:
        """Return the fields, with torch's reference counter for receivers disabled.

        torch would decrement it each time a process opens and closes the buffer; below zero, memory is never freed.
        """
        return asdict(self) | {"ref_counter_handle": b"/uncounted"}

    def open(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on `device`, in this process's numbering."""
        given = asdict(self) | {
            "tensor_cls": torch.Tensor,
            "tensor_size": (self.tensor_size,),
            "tensor_stride": (1,),
            "storage_cls": torch.TypedStorage,
            "dtype": torch.uint8,
            "storage_device": device.index,
            "requires_grad": False,
        }
        return rebuild_cuda_tensor(**{name: given[name] for name in _IPC_ARGUMENTS})


Location = dict[str, Any]
SLOTS = 2


class SendingEnd:
    """Sending end of a transport: the slots, uint8, on a device.

    group: broadcasts the bytes from rank 0 to every engine process; None if their location is enough. Ranks that only
    take part in the export have slots on "meta", without memory, which fill in step with the others.
    """

    group: dist.ProcessGroup | None = None

    def __init__(
        self, slot_bytes: int, device: str | torch.device = "meta", group: dist.ProcessGroup | None = None
    ) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self.group = group

    def locate(self, slot: int, used: int) -> Location:
        """Return the location of a slot's first `used` bytes, which are complete when this returns."""
        return {"kind": "broadcast", "bytes": used}

    def close(self) -> None:
        self.slots = ()


class SharedMemorySender(SendingEnd):
    """Slots in anonymous shared memory, which the same user's processes on this machine open through /proc."""

    def __init__(self, slot_bytes: int, slots: int = SLOTS) -> None:
        self._slot_bytes = slot_bytes
        self._name = uuid.uuid4().hex  # for receivers, since a later sender may get the same path
        self._file = os.memfd_create(f"nemo_rl_mcore_{self._name}")
        os.ftruncate(self._file, slot_bytes * slots)
        memory = torch.frombuffer(mmap.mmap(self._file, slot_bytes * slots), dtype=torch.uint8)
        self.slots = memory.split(slot_bytes)

    def locate(self, slot: int, used: int) -> Location:
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        start = slot * self._slot_bytes
        return {"kind": "shared_memory", "name": self._name, "path": path, "offset": start, "bytes": used}

    def close(self) -> None:
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class MessageSender(SendingEnd):
    """Slots whose bytes are sent in the message, to any machine."""

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(slot_bytes, "cpu")

    def locate(self, slot: int, used: int) -> Location:
        return {"kind": "message", "data": self.slots[slot][:used].numpy()}


class CudaIpcSender(SendingEnd):
    """Slots on this rank's GPU, which the engine process on the same GPU opens with an IPC handle.

    The first rank sends all ranks' handles, which are gathered once.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        super().__init__(slot_bytes, device)
        self._own: list[IpcHandle] = []
        for slot in self.slots:
            _, arguments = reduce_tensor(slot)
            given: dict[str, Any] = dict(zip(_IPC_ARGUMENTS, arguments, strict=True))
            given["tensor_size"] = slot.numel()
            self._own.append(IpcHandle(**{field.name: given[field.name] for field in fields(IpcHandle)}))
        own = {accelerator.device_uuid(device): [handle.to_message() for handle in self._own]}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        self._handles: dict[str, list[dict[str, Any]]] = {
            gpu: handles for rank in ranks for gpu, handles in rank.items()
        }

    def locate(self, slot: int, used: int) -> Location:
        accelerator.synchronize(self.slots[slot].device)
        handles = {gpu: slots[slot] for gpu, slots in self._handles.items()}
        return {"kind": "cuda_ipc", "handles": handles, "bytes": used}

    def close(self) -> None:
        """Free the slots, even if an engine died with them open, or never opened them."""
        # torch counts one receiver from the start, and keeps the memory until the count is 0.
        for handle in self._own:
            torch.TypedStorage._release_ipc_counter(
                handle.ref_counter_handle, handle.ref_counter_offset, device=accelerator.device()
            )
        self.slots, self._own = (), []
        accelerator.free_shared_memory()


def broadcast_from_first(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast a buffer from the group's rank 0; complete on the device when this returns."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()
    accelerator.synchronize(buffer.device)


def join_broadcast_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device_type: str,
    listening: socket.socket | None = None,
) -> dist.ProcessGroup:
    """Return an additional process group that joins the trainer (rank 0) and the engine processes.

    Rank 0 passes the listening socket, and does not wait here: NCCL connects at the first broadcast.
    """
    store = rendezvous.store(address, port, world_size, timeout, listening)
    group = dist.ProcessGroup(store, rank, world_size)
    if device_type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group
