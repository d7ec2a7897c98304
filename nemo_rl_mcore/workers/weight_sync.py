"""Refit: the weights of the training ranks, streamed bucket by bucket into the engines, without a file.

Two buffers take turns: while the engines load one, the next tensors fill the other. So besides the model nothing is
held but these two and the tensor that is being exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.vllm.buckets import Bucket, Packer
from nemo_rl_mcore.generation.vllm.transports import (
    SLOTS,
    BroadcastSender,
    CudaIpcSender,
    Location,
    SendingEnd,
    SharedMemorySender,
    join_broadcast_group,
)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class EngineLostError(RunStoppedError):
    """An engine died, or did not acknowledge a bucket in time."""


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

    Every rank takes part in exporting each tensor; the first one sends to the engines, which are Ray actors with a
    method `load_bucket`. Other ranks fill buffers only where the transport has them do so.
    """

    def __init__(self, settings: RefitSettings, engines: Sequence[Any], transport: SendingEnd | None) -> None:
        self._settings, self._engines, self._transport = settings, engines, transport
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._packers = [Packer(slot) for slot in transport.slots] if transport else []
        self._unacknowledged: list[list[Any]] = [[] for _ in self._packers]
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
            self._unacknowledged = [[] for _ in self._packers]
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
            self._unacknowledged[self._slot] = [
                engine.load_bucket.remote(message) for engine in self._engines
            ]
            self._transport.transmit(self._slot, packer.used)
        self._slot = (self._slot + 1) % len(self._packers)
        self._wait_for_engines(self._slot)
        self._packers[self._slot].clear()

    def _wait_for_engines(self, slot: int) -> None:
        assert self._transport is not None
        for engine, acknowledgement in enumerate(self._unacknowledged[slot]):
            _wait(acknowledgement, engine, self._settings.timeout_s)
        self._unacknowledged[slot] = []
        self._transport.reclaim(slot)


def _wait(acknowledgement: Any, engine: int, timeout_s: float) -> None:
    try:
        ray.get(acknowledgement, timeout=timeout_s)
    except GetTimeoutError as error:
        raise EngineLostError(
            f"vLLM engine {engine} did not acknowledge a bucket of weights within {timeout_s:g} s "
            "(policy.generation.vllm_cfg.call_timeout_s)"
        ) from error
    except RayActorError as error:
        raise EngineLostError(f"vLLM engine {engine} died during a refit") from error


def open_sender(
    settings: RefitSettings, engines: Sequence[Any], device: torch.device, meeting: BroadcastMeeting | None
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


class RayObjectSender:
    """Slots whose bytes travel as objects of Ray's store, to any machine."""

    def __init__(self, slot_bytes: int) -> None:
        self.slots: Sequence[torch.Tensor] = [
            torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(SLOTS)
        ]

    def locate(self, slot: int, used: int) -> Location:
        """See `SendingEnd.locate`."""
        return {"kind": "ray", "object": ray.put(self.slots[slot][:used].numpy())}

    def transmit(self, slot: int, used: int) -> None:
        """Nothing to do: Ray sends the object to who asks for it."""

    def reclaim(self, slot: int) -> None:
        """Nothing to do: one rank sends."""

    def close(self) -> None:
        """See `SendingEnd.close`."""
        self.slots = ()


class RayObjectRelay:
    """Puts buckets that came as Ray objects into shared memory, from where vLLM's own processes read them."""

    def __init__(self) -> None:
        self._memory: SharedMemorySender | None = None

    def relay(self, message: dict[str, Any]) -> dict[str, Any]:
        """The same bucket, to be found in shared memory; the one before it must have been loaded."""
        if message["location"]["kind"] != "ray":
            return message
        data = torch.from_numpy(ray.get(message["location"]["object"]).copy())
        if self._memory is None or self._memory.slots[0].numel() < data.numel():
            self.close()
            self._memory = SharedMemorySender(data.numel(), slots=1)
        self._memory.slots[0][: data.numel()].copy_(data)
        return {**message, "location": self._memory.locate(0, data.numel())}

    def close(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
