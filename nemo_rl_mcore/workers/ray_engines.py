"""Engines that are Ray actors, as a refit reaches them, and buckets that travel through Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from nemo_rl_mcore.generation.vllm.transports import SLOTS, Location, SharedMemorySender
from nemo_rl_mcore.workers.weight_sync import EngineLostError


class RayEngines:
    """`weight_sync.Engines` over actors with a method `load_bucket`."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = [*actors]

    def load_bucket(self, message: dict[str, Any]) -> list[Any]:
        """See `Engines.load_bucket`."""
        return [actor.load_bucket.remote(message) for actor in self._actors]

    def wait(self, loading: list[Any], timeout_s: float) -> None:
        """See `Engines.wait`."""
        for engine, acknowledgement in enumerate(loading):
            _wait(acknowledgement, engine, timeout_s)


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
