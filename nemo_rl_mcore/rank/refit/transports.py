"""How tensors, packed into buffers, get from a training rank into an engine; the two ends of each way stand together.

A sender's end owns the slots that are filled in turn, so that one is filled while the engine reads the other. A
receiver's end finds the buffer by the `location` that a bucket carries.
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
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl_mcore.rank import accelerator, rendezvous

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
        self._tensors.clear()
        self.used = 0


_IPC_ARGUMENTS = tuple(inspect.signature(rebuild_cuda_tensor).parameters)


@dataclass(frozen=True)
class IpcHandle:
    """A tensor on a GPU as another process opens it: torch's handle in plain fields, which need no pickle to travel.

    It is a flat uint8 tensor of `tensor_size` bytes; the other fields are arguments of torch's `rebuild_cuda_tensor`.
    """

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
        """Return the handle of a flat uint8 tensor of this process, which counts one receiver from then on."""
        assert slot.dtype is torch.uint8
        assert slot.is_contiguous()
        _, arguments = reduce_tensor(slot)
        given: dict[str, Any] = dict(zip(_IPC_ARGUMENTS, arguments, strict=True)) | {
            "tensor_size": slot.numel()
        }
        return cls(**{field.name: given[field.name] for field in fields(cls)})

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
        return rebuild_cuda_tensor(**{name: given[name] for name in _IPC_ARGUMENTS})

    def release(self, device: torch.device) -> None:
        """Count one receiver less, in the process that made the handle."""
        torch.TypedStorage._release_ipc_counter(
            self.ref_counter_handle, self.ref_counter_offset, device=device
        )


Location = dict[str, Any]
SLOTS = 2


class SendingEnd(Protocol):
    """A sender's end of a transport."""

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """Return the buffers, uint8."""
        ...

    def locate(self, slot: int, used: int) -> Location:
        """Return where an engine finds the first `used` bytes of a slot, which are complete when it returns."""
        ...

    def transmit(self, slot: int, used: int) -> None:
        """Send the bytes, where knowing the place is not enough; the engines have been told and are waiting."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...


class ReceivingEnd(Protocol):
    """An engine's end of a transport."""

    def open(self, location: Location) -> torch.Tensor:
        """Return the bytes, uint8; they stay valid until the bucket has been acknowledged."""
        ...

    def close(self) -> None:
        """Forget the sender's buffers."""
        ...


class SharedMemorySender:
    """Slots in anonymous shared memory, which goes with the last process that uses it: nothing is left to clean up.

    Receivers of the same user and machine reach it through /proc. Pages that were never written take no memory.
    """

    def __init__(self, slot_bytes: int, slots: int = SLOTS) -> None:
        self._slot_bytes = slot_bytes
        self._name = uuid.uuid4().hex  # a later sender may get the same path
        self._file = os.memfd_create(f"nemo_rl_mcore_{self._name}")
        os.ftruncate(self._file, slot_bytes * slots)
        memory = torch.frombuffer(mmap.mmap(self._file, slot_bytes * slots), dtype=torch.uint8)
        self.slots: Sequence[torch.Tensor] = memory.split(slot_bytes)

    def locate(self, slot: int, used: int) -> Location:
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        start = slot * self._slot_bytes
        return {"kind": "shared_memory", "name": self._name, "path": path, "offset": start, "bytes": used}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: the memory is shared."""

    def close(self) -> None:
        self.slots = ()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Bystander:
    """Slots without memory, of a rank that only takes part in the export: they fill as those of the first rank do."""

    def __init__(self, slot_bytes: int, slots: int = SLOTS) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8, device="meta") for _ in range(slots)
        ]

    def locate(self, slot: int, used: int) -> Location:
        return {}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: the first rank sends."""

    def close(self) -> None:
        pass


class SharedMemoryReceiver:
    """Maps a sender's memory once for all its buckets."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}

    def open(self, location: Location) -> torch.Tensor:
        name: str = location["name"]
        if name not in self._mapped:
            with open(location["path"], "r+b") as file:
                self._mapped[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._mapped[name][location["offset"] : location["offset"] + location["bytes"]]

    def close(self) -> None:
        self._mapped.clear()


class MessageSender:
    """Slots whose bytes travel within the message, to any machine: whoever carries that has an object store."""

    def __init__(self, slot_bytes: int, slots: int = SLOTS) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(slots)
        ]

    def locate(self, slot: int, used: int) -> Location:
        return {"kind": "message", "data": self.slots[slot][:used].numpy()}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: who took the message has the bytes."""

    def close(self) -> None:
        self.slots = ()


class MessageReceiver:
    """Takes the bytes out of the message itself."""

    def open(self, location: Location) -> torch.Tensor:
        return torch.frombuffer(bytearray(location["data"]), dtype=torch.uint8)

    def close(self) -> None:
        pass


class MessageRelay:
    """Puts buckets that came within a message into shared memory, for an engine that has processes of its own.

    over_machines: some of them are on other machines, where the engine's own queue carries the bytes.
    """

    def __init__(self, *, over_machines: bool = False) -> None:
        self._memory: SharedMemorySender | None = None
        self._over_machines = over_machines

    def relay(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the same bucket, to be found in shared memory; the one before it must have been loaded."""
        if message["location"]["kind"] != "message":
            return message
        if self._over_machines:
            return {**message, "location": {"kind": "message", "data": message["location"]["data"].tobytes()}}
        data = torch.tensor(message["location"]["data"])
        if self._memory is None or self._memory.slots[0].numel() < data.numel():
            self.close()
            self._memory = SharedMemorySender(data.numel(), slots=1)
        self._memory.slots[0][: data.numel()].copy_(data)
        return {**message, "location": self._memory.locate(0, data.numel())}

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class CudaIpcSender:
    """Slots on this rank's GPU, which the engine on the same GPU opens by an inter-process handle.

    Every rank fills slots of its own, since each engine process sits beside one of them; the handles are exchanged
    once, by GPU, and the first rank sends them all.
    """

    def __init__(self, slot_bytes: int, device: torch.device, slots: int = SLOTS) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)
        ]
        self._own = [IpcHandle.of(slot) for slot in self.slots]
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

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: the memory is shared."""

    def close(self) -> None:
        """See `SendingEnd.close`; what an engine that died has opened, or no engine ever has, is freed too."""
        # torch counts one receiver from the start, and keeps the memory until the count is 0.
        for handle in self._own:
            handle.release(accelerator.device())
        self.slots, self._own = (), []
        accelerator.free_shared_memory()


class CudaIpcReceiver:
    """Opens the slot of the rank on this engine's GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self, location: Location) -> torch.Tensor:
        gpu = accelerator.device_uuid(self._device)
        if gpu not in location["handles"]:
            raise RuntimeError(
                f"no training rank shares GPU {gpu} with this engine, which CUDA IPC needs (the ranks are on "
                f"{sorted(location['handles'])}); set policy.generation.refit_transport: nccl"
            )
        return IpcHandle(**location["handles"][gpu]).open(self._device)[: location["bytes"]]

    def close(self) -> None:
        accelerator.free_shared_memory()


class BroadcastSender:
    """Slots of the first rank, broadcast to every engine process (NCCL on GPUs); that rank is 0 of the group."""

    def __init__(
        self, slot_bytes: int, device: torch.device, group: dist.ProcessGroup, slots: int = SLOTS
    ) -> None:
        self._group = group
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)
        ]

    def locate(self, slot: int, used: int) -> Location:
        return {"kind": "broadcast", "bytes": used}

    def transmit(self, slot: int, used: int) -> None:
        broadcast_from_first(self.slots[slot][:used], self._group)

    def close(self) -> None:
        self.slots = ()


class BroadcastReceiver:
    """Takes part in the broadcast of a slot."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group

    def open(self, location: Location) -> torch.Tensor:
        buffer = torch.empty(location["bytes"], dtype=torch.uint8, device=self._device)
        broadcast_from_first(buffer, self._group)
        return buffer

    def close(self) -> None:
        pass


def broadcast_from_first(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send a buffer from the group's rank 0 to the others; complete on the device when it returns."""
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
    """Return a group beside the default one, whose ranks belong to other process groups: the trainer is rank 0.

    Rank 0 brings the socket that listens at this address and port. NCCL connects with the first broadcast, so that rank
    0 does not wait here for the others.
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


class Receivers:
    """An engine's ends of all transports in one process, each opened when the first bucket comes that way.

    device: what its model is on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, ReceivingEnd] = {}
        self._group: dist.ProcessGroup | None = None

    def join_broadcast(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the group in which the trainer's rank 0 broadcasts, in place of the one before."""
        if (end := self._open.pop("broadcast", None)) is not None:
            end.close()
        timeout = timedelta(seconds=timeout_s)
        self._group = join_broadcast_group(address, port, rank, world_size, timeout, self._device.type)

    def read(self, message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each in the bucket, as views that are valid until the bucket is acknowledged."""
        bucket = Bucket.from_message(message)
        yield from bucket.read(self._end(bucket.location["kind"]).open(bucket.location))

    def close(self) -> None:
        for end in self._open.values():
            end.close()
        self._open.clear()

    def _end(self, kind: str) -> ReceivingEnd:
        match kind:
            case _ if kind in self._open:
                pass
            case "shared_memory":
                self._open[kind] = SharedMemoryReceiver()
            case "cuda_ipc":
                self._open[kind] = CudaIpcReceiver(self._device)
            case "message":
                self._open[kind] = MessageReceiver()
            case "broadcast":
                assert self._group is not None
                self._open[kind] = BroadcastReceiver(self._device, self._group)
            case _:
                raise ValueError(f"this engine has no end of the transport {kind!r}")
        return self._open[kind]
