"""Receiving ends of `rank.refit.transports`, in an engine's processes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.refit.transports import (
    Bucket,
    IpcHandle,
    Location,
    SharedMemorySender,
    broadcast_from_first,
    join_broadcast_group,
)


class ReceivingEnd:
    """An engine's end of a transport."""

    def open(self, location: Location) -> torch.Tensor:
        """Return the bytes, uint8; they stay valid until the bucket has been acknowledged."""
        raise NotImplementedError

    def close(self) -> None:
        """Forget the sender's buffers."""


@dataclass
class SharedMemoryReceiver(ReceivingEnd):
    """Maps a sender's memory once for all its buckets."""

    _mapped: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def open(self, location: Location) -> torch.Tensor:
        name: str = location["name"]
        if name not in self._mapped:
            with open(location["path"], "r+b") as file:
                self._mapped[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._mapped[name][location["offset"] : location["offset"] + location["bytes"]]

    def close(self) -> None:
        self._mapped.clear()


class MessageReceiver(ReceivingEnd):
    """Takes the bytes out of the message itself."""

    def open(self, location: Location) -> torch.Tensor:
        return torch.frombuffer(bytearray(location["data"]), dtype=torch.uint8)


@dataclass
class MessageRelay:
    """Puts buckets that came within a message into shared memory, for an engine that has processes of its own.

    over_machines: some of them are on other machines, where the engine's own queue carries the bytes.
    """

    over_machines: bool = False
    _memory: SharedMemorySender | None = None

    def relay(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the same bucket, to be found in shared memory; the one before it must have been loaded."""
        if message["location"]["kind"] != "message":
            return message
        if self.over_machines:
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


@dataclass
class CudaIpcReceiver(ReceivingEnd):
    """Opens the slot of the rank on this engine's GPU."""

    device: torch.device

    def open(self, location: Location) -> torch.Tensor:
        gpu = accelerator.device_uuid(self.device)
        if gpu not in location["handles"]:
            raise RuntimeError(
                f"no training rank shares GPU {gpu} with this engine, which CUDA IPC needs (the ranks are on "
                f"{sorted(location['handles'])}); set policy.generation.refit_transport: nccl"
            )
        return IpcHandle(**location["handles"][gpu]).open(self.device)[: location["bytes"]]

    def close(self) -> None:
        accelerator.free_shared_memory()


@dataclass
class BroadcastReceiver(ReceivingEnd):
    """Takes part in the broadcast of a slot."""

    device: torch.device
    group: dist.ProcessGroup

    def open(self, location: Location) -> torch.Tensor:
        buffer = torch.empty(location["bytes"], dtype=torch.uint8, device=self.device)
        broadcast_from_first(buffer, self.group)
        return buffer


@dataclass
class Receivers:
    """An engine's ends of all transports in one process, each opened when the first bucket comes that way.

    device: what its model is on.
    """

    device: torch.device
    _open: dict[str, ReceivingEnd] = field(default_factory=dict[str, ReceivingEnd])
    _group: dist.ProcessGroup | None = None

    def join_broadcast(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the group in which the trainer's rank 0 broadcasts, in place of the one before."""
        if (end := self._open.pop("broadcast", None)) is not None:
            end.close()
        timeout = timedelta(seconds=timeout_s)
        self._group = join_broadcast_group(address, port, rank, world_size, timeout, self.device.type)

    def read(self, message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each in the bucket, as views that are valid until the bucket is acknowledged."""
        bucket = Bucket.from_message(message)
        kind = bucket.location["kind"]
        match kind:
            case _ if kind in self._open:
                pass
            case "shared_memory":
                self._open[kind] = SharedMemoryReceiver()
            case "cuda_ipc":
                self._open[kind] = CudaIpcReceiver(self.device)
            case "message":
                self._open[kind] = MessageReceiver()
            case "broadcast":
                assert self._group is not None
                self._open[kind] = BroadcastReceiver(self.device, self._group)
            case _:
                raise ValueError(f"this engine has no end of the transport {kind!r}")
        yield from bucket.read(self._open[kind].open(bucket.location))

    def close(self) -> None:
        for end in self._open.values():
            end.close()
        self._open.clear()
