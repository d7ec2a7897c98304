"""Refit: the weights of the training ranks, streamed bucket by bucket into the engines, without a file.

Two buffers alternate: while the engines load one, the next tensors fill the other. So the only extra memory is these
two buffers and the tensor being exported.
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
    """An engine died, or did not acknowledge a bucket in time; `engine` is its number, if known."""

    def __init__(self, message: str, engine: int | None = None) -> None:
        super().__init__(message)
        self.engine = engine


class Engines(Protocol):
    """A sender's connection to the engines; the driver's `RayEngines` are Ray actors."""

    def load_bucket(self, message: dict[str, Any]) -> Any:
        """Start loading a bucket on all engines; returns a handle for `wait`."""
        ...

    def wait(self, loading: Any, timeout_s: float) -> None:
        """Wait until all have loaded it; raises EngineLostError, naming the engine, or an engine's own error."""


@dataclass(frozen=True)
class RefitSettings:
    """Settings of a refit; receivers: processes that hold a part of an engine. held_as: the engines' other dtype."""

    transport: str
    bucket_bytes: int
    timeout_s: float
    receivers: int = 1
    verify: bool = True
    held_as: str | None = None


@dataclass(frozen=True)
class BroadcastRendezvous:
    """Address of a broadcast group; the trainer is rank 0 of `world_size`."""

    address: str
    port: int
    world_size: int


class WeightSender:
    """One rank's side of all refits of a run; rendezvous: of the engines' broadcast group, on the first rank.

    Every rank takes part in exporting each tensor; the first rank sends them to the engines. The others fill buffers
    only if the transport needs it, but track the buckets: when the first rank waits for the engines they wait with it,
    and not in the collectives of the next tensor, which have a short timeout.
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
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._packers = [Packer(slot) for slot in transport.slots]
        self._loading: list[Any] = [None] * len(self._packers)
        self._slot = 0

    def send(self, tensors: NamedTensors) -> dict[str, int | None]:
        """Send every tensor and wait until all are loaded; returns their names, on the first rank with digests.

        Raises EngineLostError, an engine's own error, or ValueError for a tensor larger than a bucket: on all ranks at
        the same tensor, so that none waits for another in the rest of the export.
        """
        digester = Digester(self._settings.held_as) if self._settings.verify and self._is_first else None
        sent: dict[str, int | None] = {}
        try:
            for name, tensor in tensors:
                activity.advance(f"sending {name}")
                sent[name] = None
                # The digest of the trainer's tensor, not of its copy in the buffer.
                if digester is not None:
                    digester.add(name, tensor)
                if not self._packers[self._slot].add(name, tensor):
                    self._deliver_and_turn()
                    if not self._packers[self._slot].add(name, tensor):
                        raise RefusedError(
                            f"a bucket of {self._settings.bucket_bytes} bytes is below the "
                            f"{tensor.nbytes} bytes of {name}; raise it",
                            code="bucket-size",
                        )
            if self._packers[self._slot].used:
                self._deliver_and_turn()
            with together("the end of a refit"):
                for slot in range(len(self._packers)):
                    self._wait_for_engines(slot)
            return sent if digester is None else {**digester.digests()}
        finally:
            self._loading = [None] * len(self._packers)
            for packer in self._packers:
                packer.clear()

    def close(self) -> None:
        self._packers.clear()
        self._transport.close()

    def _deliver_and_turn(self) -> None:
        """Hand the filled slot to the engines, and switch to the other once that one is free."""
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
    """Open this rank's sender; collective."""
    slot_bytes, rendezvous = settings.bucket_bytes, None
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if settings.transport == "cuda_ipc":
        transport: SendingEnd = CudaIpcSender(slot_bytes, device)
    elif not is_first:
        transport = SendingEnd(slot_bytes)
    elif settings.transport == "shared_memory":
        transport = SharedMemorySender(slot_bytes)
    elif settings.transport == "ray":
        transport = MessageSender(slot_bytes)
    else:
        address = os.environ["MASTER_ADDR"]
        listening = listen_at(address)  # reachable for the engines, as it is for other ranks
        world_size, timeout = 1 + settings.receivers, timedelta(seconds=settings.timeout_s)
        rendezvous = BroadcastRendezvous(address, listening.getsockname()[1], world_size)
        group = join_broadcast_group(address, rendezvous.port, 0, world_size, timeout, device.type, listening)
        transport = BroadcastSender(slot_bytes, device, group)
    return WeightSender(settings, engines, transport, rendezvous)
