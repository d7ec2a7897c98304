"""Engines that are Ray actors, as the first rank reaches them in a refit; a rank imports no more of the driver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.refit.sender import EngineLostError


class RayEngines:
    """`refit.sender.Engines` over actors with a method `load_bucket`.

    noun: what messages call one of them. deadline_key: of the recipe, that has the deadline of `wait`. numbers: of the
    engines in messages; left out, they count from 0.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        noun: str = "engine",
        deadline_key: str = "",
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._actors = [*actors]
        self._numbers = [*range(len(self._actors))] if numbers is None else [*numbers]
        self._noun, self._deadline_key = noun, deadline_key

    def load_bucket(self, message: dict[str, Any]) -> list[Any]:
        shared = ray.put(message)  # once for all engines, also where the message brings the bytes
        return [actor.load_bucket.remote(shared) for actor in self._actors]

    def wait(self, loading: list[Any], timeout_s: float) -> None:
        for number, acknowledgement in zip(self._numbers, loading, strict=True):
            engine, deadline = f"{self._noun} {number}", time.monotonic() + timeout_s
            while not ray.wait([acknowledgement], timeout=min(LOOK_EVERY_S, timeout_s))[0]:
                # This wait has its own deadline: the engine is late, not this rank.
                activity.advance(f"waiting for {engine}")
                if time.monotonic() >= deadline:
                    key = self._deadline_key and f" ({self._deadline_key})"
                    raise EngineLostError(
                        f"{engine} did not acknowledge a bucket of weights within {timeout_s:g} s{key}",
                        number,
                    )
            try:
                ray.get(acknowledgement)
            except RayActorError as error:
                raise EngineLostError(f"{engine} died during a refit", number) from error
