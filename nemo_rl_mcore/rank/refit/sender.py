"""Refit: the training ranks' weights, streamed bucket by bucket into the engines, without a file.

While the engines load one buffer, the next tensors fill the other. So the only extra memory is these two buffers and
the tensor being exported.
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
    Bucket,
    CudaIpcSender,
    MessageSender,
    Packer,
    SendingEnd,
    SharedMemorySender,
    broadcast_from_first,
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
    """A sender's connection to the engines; `RayEngines`, the driver's, calls Ray actors."""

    def load_bucket(self, message: dict[str, Any]) -> Any:
        """Start loading a bucket on all engines; returns a handle for `wait`."""
        ...

    def wait(self, loading: Any, timeout_s: float) -> None:
        """Wait until all engines have loaded it; raises EngineLostError, naming the engine, or an engine's error."""


@dataclass(frozen=True)
class RefitSettings:
    """A refit's settings; receivers: number of the engines' processes. held_as: the engines' dtype if it differs."""

    transport: str
    bucket_bytes: int
    timeout_s: float
    receivers: int = 1
    verify: bool = True
    held_as: str | None = None


@dataclass(frozen=True)
class BroadcastRendezvous:
    """A broadcast group's address; the trainer is rank 0."""

    address: str
    port: int
    world_size: int


class WeightSender:
    """One rank's side of all refits in a run; rendezvous: the broadcast group's, on the first rank only.

    Every rank takes part in exporting each tensor, and the first rank sends them to the engines. The others fill
    buffers only if the transport needs them to, but keep track of the buckets: while the first rank waits for the
    engines, they wait with it, and not in the next tensor's collectives, which have a short timeout.
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

        Raises EngineLostError, an engine's error, or RefusedError for a tensor larger than a bucket: on all ranks at
        the same tensor, so that none waits for another in the rest of the export.
        """
        digester = Digester(self._settings.held_as) if self._settings.verify and self._is_first else None
        sent: dict[str, int | None] = {}
        try:
            for name, tensor in tensors:
                activity.advance(f"sending {name}")
                sent[name] = None
                if digester is not None:
                    digester.add(name, tensor)  # the trainer's tensor, not its copy in the buffer
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
                for loading in self._loading:
                    if loading is not None:
                        self._engines.wait(loading, self._settings.timeout_s)
            return sent if digester is None else {**digester.digests()}
        finally:
            self._loading = [None] * len(self._packers)
            self._packers = [Packer(slot) for slot in self._transport.slots]

    def close(self) -> None:
        self._packers.clear()
        self._transport.close()

    def _deliver_and_turn(self) -> None:
        """Send the filled slot to the engines, and switch to the other slot once that is free."""
        packer = self._packers[self._slot]
        with together("a bucket that is full"):
            location = self._transport.locate(self._slot, packer.used)
        following = (self._slot + 1) % len(self._packers)
        with together("a bucket that is sent"):
            if self._is_first:
                message = Bucket(location, packer.tensors).to_message()
                self._loading[self._slot] = self._engines.load_bucket(message)
                if self._transport.group is not None:  # the engines are waiting for the bytes
                    broadcast_from_first(packer.buffer[: packer.used], self._transport.group)
            if self._loading[following] is not None:
                self._engines.wait(self._loading[following], self._settings.timeout_s)
                self._loading[following] = None
        self._slot = following
        self._packers[following] = Packer(self._transport.slots[following])


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
        listening = listen_at(address)  # reachable for the engines, as for other ranks
        world_size, timeout = 1 + settings.receivers, timedelta(seconds=settings.timeout_s)
        rendezvous = BroadcastRendezvous(address, listening.getsockname()[1], world_size)
        group = join_broadcast_group(address, rendezvous.port, 0, world_size, timeout, device.type, listening)
        transport = SendingEnd(slot_bytes, device, group)
    return WeightSender(settings, engines, transport, rendezvous)
