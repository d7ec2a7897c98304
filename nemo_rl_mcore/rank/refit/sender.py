"""Refit: the weights of the training ranks, streamed bucket by bucket into the engines, without a file.

Two buffers take turns: while the engines load one, the next tensors fill the other. So besides the model nothing is
held but these two and the tensor that is being exported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nemo_rl_mcore.errors import RefusedError, RunStoppedError
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.agreement import together
from nemo_rl_mcore.rank.refit.digests import Digester
from nemo_rl_mcore.rank.refit.transports import (
    BroadcastSender,
    Bucket,
    Bystander,
    CudaIpcSender,
    MessageSender,
    Packer,
    SendingEnd,
    SharedMemorySender,
    join_broadcast_group,
)
from nemo_rl_mcore.rank.rendezvous import listen_at

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class EngineLostError(RunStoppedError):
    """An engine died, or did not acknowledge a bucket in time; `engine` is its number, where it is known."""

    def __init__(self, message: str, engine: int | None = None) -> None:
        super().__init__(message)
        self.engine = engine


class Engines(Protocol):
    """The engines as a sender reaches them, in whatever process; `RayEngines` of the driver are Ray actors."""

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

    receivers: processes that hold a part of an engine. timeout_s: deadline of an acknowledgement. verify: whether
    digests of the tensors are taken; held_as: number format that the engines hold them in, if not that of the trainer.
    """

    transport: str
    bucket_bytes: int
    timeout_s: float
    receivers: int = 1
    verify: bool = True
    held_as: str | None = None


@dataclass(frozen=True)
class BroadcastRendezvous:
    """Where the ranks of a broadcast meet; the trainer is rank 0 of `world_size`."""

    address: str
    port: int
    world_size: int


class WeightSender:
    """One rank's side of every refit of a run.

    Every rank takes part in exporting each tensor; the first one sends to the engines. The others fill buffers only
    where the transport has them do so, and count along: they know when the first one waits for the engines, and wait
    with it, not in the collectives of the next tensor, which have little time.

    rendezvous: where the engines join a broadcast; the first rank's, for the transport that needs one.
    """

    def __init__(
        self,
        settings: RefitSettings,
        engines: Engines,
        transport: SendingEnd,
        rendezvous: BroadcastRendezvous | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self._settings, self._engines, self._transport = settings, engines, transport
        self._is_first = _is_first()
        self._packers = [Packer(slot) for slot in transport.slots]
        self._loading: list[Any] = [None] * len(self._packers)
        self._slot = 0

    def send(self, tensors: NamedTensors) -> dict[str, int | None]:
        """Send every tensor and wait until all are loaded; returns their names, on the first rank with their digests.

        Raises EngineLostError, naming the engine, what loading raised there, or ValueError for a tensor that no bucket
        has room for: on all ranks, at the same tensor, so that none waits for another in the rest of the export.
        """
        try:
            return self._send(tensors)
        finally:
            self._loading = [None] * len(self._packers)
            for packer in self._packers:
                packer.clear()

    def close(self) -> None:
        """Free the buffers."""
        self._packers.clear()
        self._transport.close()

    def _send(self, tensors: NamedTensors) -> dict[str, int | None]:
        digester = Digester(self._settings.held_as) if self._settings.verify and self._is_first else None
        sent: dict[str, int | None] = {}
        for name, tensor in tensors:
            activity.advance(f"sending {name}")
            sent[name] = None
            # Of the trainer's tensor, not of its copy in the buffer.
            if digester is not None:
                digester.add(name, tensor)
            if not self._packers[self._slot].add(name, tensor):
                self._deliver_and_turn()
                if not self._packers[self._slot].add(name, tensor):
                    raise RefusedError(
                        f"policy.generation.refit_bucket_bytes: {self._settings.bucket_bytes} is below the "
                        f"{tensor.nbytes} bytes of {name}; raise it",
                        code="bucket-size",
                    )
        if self._packers[self._slot].used:
            self._deliver_and_turn()
        with together("the end of a refit"):
            for slot in range(len(self._packers)):
                self._wait_for_engines(slot)
        return sent if digester is None else {**digester.digests()}

    def _deliver_and_turn(self) -> None:
        """Hand the filled slot to the engines and go on with the other, once that one is free."""
        packer = self._packers[self._slot]
        with together("a bucket that is full"):
            location = self._transport.locate(self._slot, packer.used)
        following = (self._slot + 1) % len(self._packers)
        with together("a bucket that is sent"):
            if self._is_first:
                message = Bucket(location, tuple(packer.tensors)).to_message()
                self._loading[self._slot] = self._engines.load_bucket(message)
                self._transport.transmit(self._slot, packer.used)
            self._wait_for_engines(following)
        self._slot = following
        self._packers[following].clear()

    def _wait_for_engines(self, slot: int) -> None:
        if self._loading[slot] is not None:
            self._engines.wait(self._loading[slot], self._settings.timeout_s)
        self._loading[slot] = None


def open_sender(settings: RefitSettings, engines: Engines, device: torch.device) -> WeightSender:
    """Open the sender of this rank; all ranks open theirs together."""
    if settings.transport == "nccl" and _is_first():
        return _open_broadcast(settings, engines, device)
    return WeightSender(settings, engines, _sending_end(settings, device))


def _sending_end(settings: RefitSettings, device: torch.device) -> SendingEnd:
    if settings.transport == "cuda_ipc":
        return CudaIpcSender(settings.bucket_bytes, device)
    if not _is_first():
        return Bystander(settings.bucket_bytes)
    match settings.transport:
        case "shared_memory":
            return SharedMemorySender(settings.bucket_bytes)
        case "ray":
            return MessageSender(settings.bucket_bytes)
        case _:
            raise ValueError(f"refit_transport: {settings.transport!r} is not known")


def _open_broadcast(settings: RefitSettings, engines: Engines, device: torch.device) -> WeightSender:
    listening = listen_at(os.environ["MASTER_ADDR"])  # where the other ranks reach this one, the engines can
    rendezvous = BroadcastRendezvous(
        os.environ["MASTER_ADDR"], listening.getsockname()[1], 1 + settings.receivers
    )
    timeout = timedelta(seconds=settings.timeout_s)
    group = join_broadcast_group(
        rendezvous.address, rendezvous.port, 0, rendezvous.world_size, timeout, device.type, listening
    )
    transport = BroadcastSender(settings.bucket_bytes, device, group)
    return WeightSender(settings, engines, transport, rendezvous)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
