"""How a filled buffer gets from a training rank into an engine; the two ends of each way stand together.

A sender's end owns the slots that are filled in turn, so that one is filled while the engine reads the other. A
receiver's end finds the buffer by the `location` that a bucket carries.
"""

from __future__ import annotations

import mmap
import os
import pickle
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl_mcore import accelerator

Location = dict[str, Any]
SLOTS = 2


class SendingEnd(Protocol):
    """A sender's end of a transport."""

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """The buffers, uint8; empty on a rank that only takes part in the collectives of the export."""
        ...

    def locate(self, slot: int, used: int) -> Location:
        """Where an engine finds the first `used` bytes of a slot; all ranks with slots call it together."""
        ...

    def transmit(self, slot: int, used: int) -> None:
        """Send the bytes, where knowing the place is not enough; the engines have been told and are waiting."""
        ...

    def reclaim(self, slot: int) -> None:
        """Wait until every rank knows that the engines are done with a slot; the first rank does when it calls."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...


class ReceivingEnd(Protocol):
    """An engine's end of a transport."""

    def open(self, location: Location) -> torch.Tensor:
        """The bytes, uint8; they stay valid until the bucket has been acknowledged."""
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
        """See `SendingEnd.locate`."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        start = slot * self._slot_bytes
        return {"kind": "shared_memory", "name": self._name, "path": path, "offset": start, "bytes": used}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: the memory is shared."""

    def reclaim(self, slot: int) -> None:
        """Nothing to do: one rank sends."""

    def close(self) -> None:
        """See `SendingEnd.close`."""
        self.slots = ()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemoryReceiver:
    """Maps a sender's memory once for all its buckets."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}

    def open(self, location: Location) -> torch.Tensor:
        """See `ReceivingEnd.open`."""
        name: str = location["name"]
        if name not in self._mapped:
            with open(location["path"], "r+b") as file:
                self._mapped[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._mapped[name][location["offset"] : location["offset"] + location["bytes"]]

    def close(self) -> None:
        """See `ReceivingEnd.close`."""
        self._mapped.clear()


class CudaIpcSender:
    """Slots on this rank's GPU, which the engine on the same GPU opens by an inter-process handle.

    Every rank fills slots of its own, since each engine process sits beside one of them; the handles are exchanged
    once, by GPU, and the first rank sends them all.
    """

    _COUNTER = slice(11, 13)
    """Where the arguments that rebuild a CUDA tensor name the counter of its receivers: a file and a place in it."""

    def __init__(self, slot_bytes: int, device: torch.device, slots: int = SLOTS) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)
        ]
        arguments = [reduce_tensor(slot)[1] for slot in self.slots]
        self._counters = [slot[self._COUNTER] for slot in arguments]
        # As bytes: a handle names classes, which not every serializer on the way to an engine takes.
        own = {accelerator.device_uuid(device): [pickle.dumps(slot) for slot in arguments]}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        self._handles: dict[str, list[bytes]] = {
            gpu: handles for rank in ranks for gpu, handles in rank.items()
        }

    def locate(self, slot: int, used: int) -> Location:
        """See `SendingEnd.locate`; the copies into the slot are complete on every rank when it returns."""
        accelerator.synchronize(self.slots[slot].device)
        dist.barrier()
        handles = {gpu: slots[slot] for gpu, slots in self._handles.items()}
        return {"kind": "cuda_ipc", "handles": handles, "bytes": used}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: the memory is shared."""

    def reclaim(self, slot: int) -> None:
        """See `SendingEnd.reclaim`."""
        dist.barrier()

    def close(self) -> None:
        """See `SendingEnd.close`; what an engine that died has opened, or no engine ever has, is freed too."""
        # torch counts one receiver from the start, and keeps the memory until the count is 0 or less.
        for counter in self._counters:
            torch.TypedStorage._release_ipc_counter(*counter, device=accelerator.device())
        self.slots, self._counters = (), []
        accelerator.free_shared_memory()


class CudaIpcReceiver:
    """Opens the slot of the rank on this engine's GPU."""

    _DEVICE_INDEX = 6
    """Where the arguments that rebuild a CUDA tensor name the device, which the sender may number otherwise."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self, location: Location) -> torch.Tensor:
        """See `ReceivingEnd.open`."""
        gpu = accelerator.device_uuid(self._device)
        if gpu not in location["handles"]:
            raise RuntimeError(
                f"no training rank shares GPU {gpu} with this engine, which CUDA IPC needs (the ranks are on "
                f"{sorted(location['handles'])}); set policy.generation.refit_transport: nccl"
            )
        arguments = list(pickle.loads(location["handles"][gpu]))
        arguments[self._DEVICE_INDEX] = self._device.index
        return rebuild_cuda_tensor(*arguments)[: location["bytes"]]

    def close(self) -> None:
        """See `ReceivingEnd.close`."""
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
        """See `SendingEnd.locate`."""
        return {"kind": "broadcast", "bytes": used}

    def transmit(self, slot: int, used: int) -> None:
        """See `SendingEnd.transmit`."""
        broadcast_from_first(self.slots[slot][:used], self._group)

    def reclaim(self, slot: int) -> None:
        """Nothing to do: one rank sends."""

    def close(self) -> None:
        """See `SendingEnd.close`."""
        self.slots = ()


class BroadcastReceiver:
    """Takes part in the broadcast of a slot."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group

    def open(self, location: Location) -> torch.Tensor:
        """See `ReceivingEnd.open`."""
        buffer = torch.empty(location["bytes"], dtype=torch.uint8, device=self._device)
        broadcast_from_first(buffer, self._group)
        return buffer

    def close(self) -> None:
        """See `ReceivingEnd.close`."""


def broadcast_from_first(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send a buffer from the group's rank 0 to the others; complete on the device when it returns."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()
    accelerator.synchronize(buffer.device)


def join_broadcast_group(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta, device_type: str
) -> dist.ProcessGroup:
    """A group beside the default one, whose ranks belong to other process groups: the trainer is rank 0.

    NCCL connects with the first broadcast, so that rank 0 does not wait here for the others.
    """
    store: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
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
