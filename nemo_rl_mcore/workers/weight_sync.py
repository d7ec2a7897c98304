"""Refit: the weights of the training ranks, streamed bucket by bucket into the engines, without a file.

Two buffers take turns: while the engines load one, the next tensors fill the other. So besides the model nothing is
held but these two and the tensor that is being exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.vllm.buckets import Bucket, Packer
from nemo_rl_mcore.generation.vllm.transports import (
    BroadcastSender,
    CudaIpcSender,
    SendingEnd,
    SharedMemorySender,
    join_broadcast_group,
)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class EngineLostError(RunStoppedError):
    """An engine died, or did not acknowledge a bucket in time."""


class Engines(Protocol):
    """The engines as a sender reaches them, in whatever process they are; `ray_engines.RayEngines` are Ray actors."""

    def load_bucket(self, message: dict[str, Any]) -> Any:
        """Have all of them load a bucket, without waiting for it; returns what `wait` takes."""
        ...

    def wait(self, loading: Any, timeout_s: float) -> None:
        """Wait until all of them have loaded it.

        Raises EngineLostError, naming the engine, or what loading raised there.
        """
        ...


@dataclass(frozen=True)
class RefitSettings:
    """How weights travel: `transport` is a value of policy.generation.refit_transport.

    receivers: processes that hold a part of an engine. timeout_s: deadline of an acknowledgement.
    """

    transport: str
    bucket_bytes: int
    timeout_s: float
    receivers: int = 1


@dataclass(frozen=True)
class BroadcastMeeting:
    """Where the ranks of a broadcast meet; the trainer is rank 0 of `world_size`."""

    address: str
    port: int
    world_size: int


class WeightSender:
    """One rank's side of every refit of a run.

    Every rank takes part in exporting each tensor; the first one sends to the engines. Other ranks fill buffers only
    where the transport has them do so.
    """

    def __init__(self, settings: RefitSettings, engines: Engines, transport: SendingEnd | None) -> None:
        self._settings, self._engines, self._transport = settings, engines, transport
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._packers = [Packer(slot) for slot in transport.slots] if transport else []
        self._loading: list[Any] = [None] * len(self._packers)
        self._slot = 0

    def send(self, tensors: NamedTensors) -> int:
        """Send every tensor and wait until all are loaded; returns how many they are.

        Whatever goes wrong, the export runs to its end, because other ranks take part in it.
        Raises EngineLostError, naming the engine, or ValueError for a tensor that no bucket has room for.
        """
        rest = iter(tensors)
        try:
            return self._send(rest)
        finally:
            self._loading = [None] * len(self._packers)
            for packer in self._packers:
                packer.clear()
            for _ in rest:
                pass

    def close(self) -> None:
        """Free the buffers."""
        self._packers.clear()
        if self._transport is not None:
            self._transport.close()

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        count = 0
        for name, tensor in tensors:
            count += 1
            if self._packers and not self._packers[self._slot].add(name, tensor):
                self._deliver_and_turn()
                if not self._packers[self._slot].add(name, tensor):
                    raise ValueError(
                        f"policy.generation.refit_bucket_bytes: {self._settings.bucket_bytes} is below the "
                        f"{tensor.nbytes} bytes of {name}; raise it"
                    )
        if self._packers and self._packers[self._slot].used:
            self._deliver_and_turn()
        for slot in range(len(self._packers)):
            self._wait_for_engines(slot)
        return count

    def _deliver_and_turn(self) -> None:
        """Hand the filled slot to the engines and go on with the other, once that one is free."""
        assert self._transport is not None
        packer = self._packers[self._slot]
        location = self._transport.locate(self._slot, packer.used)
        if self._is_first:
            message = Bucket(location, tuple(packer.tensors)).to_message()
            self._loading[self._slot] = self._engines.load_bucket(message)
            self._transport.transmit(self._slot, packer.used)
        self._slot = (self._slot + 1) % len(self._packers)
        self._wait_for_engines(self._slot)
        self._packers[self._slot].clear()

    def _wait_for_engines(self, slot: int) -> None:
        assert self._transport is not None
        if self._loading[slot] is not None:
            self._engines.wait(self._loading[slot], self._settings.timeout_s)
        self._loading[slot] = None
        self._transport.reclaim(slot)


def open_sender(
    settings: RefitSettings, engines: Engines, device: torch.device, meeting: BroadcastMeeting | None
) -> WeightSender:
    """Open the sender of this rank; all ranks open theirs together."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return WeightSender(settings, engines, _open_transport(settings, is_first, device, meeting))


def _open_transport(
    settings: RefitSettings, is_first: bool, device: torch.device, meeting: BroadcastMeeting | None
) -> SendingEnd | None:
    if settings.transport == "cuda_ipc":
        return CudaIpcSender(settings.bucket_bytes, device)
    if not is_first:
        return None
    match settings.transport:
        case "shared_memory":
            return SharedMemorySender(settings.bucket_bytes)
        case "ray":
            # Its driver and engines need Ray, the ways above and below do not.
            from nemo_rl_mcore.workers.ray_engines import RayObjectSender

            return RayObjectSender(settings.bucket_bytes)
        case "nccl":
            assert meeting is not None
            timeout = timedelta(seconds=settings.timeout_s)
            group = join_broadcast_group(
                meeting.address, meeting.port, 0, meeting.world_size, timeout, device.type
            )
            return BroadcastSender(settings.bucket_bytes, device, group)
        case _:
            raise ValueError(f"refit_transport: {settings.transport!r} is not known")
