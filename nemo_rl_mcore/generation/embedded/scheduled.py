"""An embedded engine that repeats which weights drew which token, so that an asynchronous run can be replayed."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_mcore.generation.embedded.engine import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.generation.engine import Request, Response, Sampling
from nemo_rl_mcore.generation.refit.verification import Digests


@dataclass(frozen=True)
class ScheduledSettings(EmbeddedSettings):
    """schedules: by ticket, from which decode step on (counted from 0) a group is of which version."""

    schedules: Mapping[str, Sequence[tuple[int, int]]] = field(
        default_factory=dict[str, Sequence[tuple[int, int]]]
    )


class ScheduledEngine(EmbeddedEngine):
    """Draws each token with the weights that its group's schedule names; a refit waits until they are not needed."""

    def __init__(self, settings: ScheduledSettings) -> None:
        super().__init__(settings)
        self._schedules = settings.schedules
        self._wanted: dict[str, int] = {}  # by the groups under way
        self._moved = asyncio.Condition()

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None = None, ticket: str = ""
    ) -> list[Response]:
        """See `Engine.generate`; `ticket` has a schedule."""
        if ticket not in self._schedules:
            raise ValueError(f"{ticket} is not in the log: answers before it are not those of the log")
        self._wanted[ticket] = self._schedules[ticket][0][1]
        try:
            return await super().generate(requests, sampling, version, ticket)
        finally:
            del self._wanted[ticket]
            async with self._moved:
                self._moved.notify_all()

    async def begin_refit(self, version: int) -> None:
        """See `Engine.begin_refit`; waits for the groups that are to draw tokens with the weights before."""
        async with self._moved:
            await self._moved.wait_for(lambda: all(wanted >= version for wanted in self._wanted.values()))
        await super().begin_refit(version)

    async def finish_refit(self, version: int, sent: Digests) -> int:
        """See `Engine.finish_refit`."""
        finished = await super().finish_refit(version, sent)
        async with self._moved:
            self._moved.notify_all()
        return finished

    async def _admitted(self, ticket: str, step: int) -> None:
        schedule = self._schedules[ticket]
        place = bisect_right(schedule, step, key=lambda segment: segment[0]) - 1
        async with self._moved:
            self._wanted[ticket] = schedule[place][1]
            self._moved.notify_all()
            await self._moved.wait_for(lambda: self.weights.version == schedule[place][1])
