"""The receiving side of `rank.refit.transports`, in an engine's processes."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.refit.transports import (
    IpcHandle,
    Location,
    SharedMemorySender,
    broadcast_from_first,
)


@dataclass
class MessageRelay:
    """Copies buckets sent within messages to shared memory, for an engine with its own processes.

    over_machines: some processes are on other machines, and get the bytes through the engine's own queue.
    """

    over_machines: bool = False
    _memory: SharedMemorySender | None = None

    def relay(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the bucket in shared memory; the previous bucket must have been loaded."""
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
class Receiver:
    """The receiving side of all transports in one engine process.

    device: the model's device. group: the group in which the trainer's rank 0 broadcasts, once joined.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    _mapped: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """The sender's memory, mapped once for all buckets."""
    _shares_gpu: bool = False

    def open(self, location: Location) -> torch.Tensor:
        """Return a bucket's bytes, uint8; valid until the bucket is acknowledged."""
        match location["kind"]:
            case "message":
                return torch.frombuffer(bytearray(location["data"]), dtype=torch.uint8)
            case "shared_memory":
                name: str = location["name"]
                if name not in self._mapped:
                    with open(location["path"], "r+b") as file:
                        self._mapped[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
                return self._mapped[name][location["offset"] : location["offset"] + location["bytes"]]
            case "broadcast":
                assert self.group is not None
                buffer = torch.empty(location["bytes"], dtype=torch.uint8, device=self.device)
                broadcast_from_first(buffer, self.group)
                return buffer
            case "cuda_ipc":
                gpu, handles = accelerator.device_uuid(self.device), location["handles"]
                if gpu not in handles:
                    raise RuntimeError(
                        f"no training rank shares GPU {gpu} with this engine, which CUDA IPC needs (the ranks are on "
                        f"{sorted(handles)}); set policy.generation.refit_transport: nccl"
                    )
                self._shares_gpu = True
                return IpcHandle(**handles[gpu]).open(self.device)[: location["bytes"]]
            case kind:
                raise ValueError(f"this engine has no end of the transport {kind!r}")

    def close(self) -> None:
        """Drop the sender's buffers."""
        self._mapped.clear()
        if self._shares_gpu:
            accelerator.free_shared_memory()
