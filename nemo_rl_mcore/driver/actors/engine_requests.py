"""Groups of requests to one engine each, asked from an asyncio loop while other calls reach all engines.

Runs in the driver, in the thread of asynchronous rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

from ray.exceptions import RayError

from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, GivenUpError, settled
from nemo_rl_mcore.driver.actors.engine_fleet import HEALTH_S, EngineFleet, StartedEngine
from nemo_rl_mcore.driver.actors.failures import Call, RankFailure, WorkerError
from nemo_rl_mcore.engine.engine import (
    EngineDiedError,
    EngineFailedError,
    EngineKind,
    Request,
    Response,
    Sampling,
)


class EngineRequests:
    """Sends each group to the engine that answers the fewest; one loop at a time asks.

    Several calls of a group, such as those of agents that play its samples, may be under way at once.
    An engine that dies, or makes no progress for `call_timeout_s` of its kind, is lost to the fleet. A task that is
    cancelled gives its group up.
    """

    def __init__(self, fleet: EngineFleet, kind: EngineKind) -> None:
        self._fleet, self._kind = fleet, kind
        self._asked: dict[str, tuple[str, StartedEngine]] = {}
        """By the name that the engine knows a call by, its ticket and its engine."""
        self._calls = count(1)

    async def respond(self, requests: Sequence[Request], sampling: Sampling, ticket: str) -> list[Response]:
        """Answer a group with whatever weights the engine holds while it draws.

        Raises EngineFailedError, naming the engine: EngineDiedError where that one is gone or none is there, but others
        start; what ends the run where none does.
        """
        engine, name = self._least_busy(), f"{ticket}, call {next(self._calls)}"
        self._asked[name] = ticket, engine
        try:
            answer = engine.process.handle.generate.remote(requests, sampling, None, name)
            return await self._answered(engine, answer)
        except asyncio.CancelledError:
            engine.process.handle.cancel.remote(name)
            raise
        except RayError as error:
            raise await self._failed(engine, engine.process.failure(error)) from None
        finally:
            del self._asked[name]

    def whereabouts(self, ticket: str) -> str:
        """Return the engines that a group was sent to, and what they said last; empty where it is with none."""
        engines = dict.fromkeys(engine for asked, engine in (*self._asked.values(),) if asked == ticket)
        return "; ".join(f"{one.process}, at {one.watch.doing(0) or 'nothing'!r}" for one in engines)

    def _least_busy(self) -> StartedEngine:
        """Of the engines that have weights."""
        busy = [engine for _, engine in self._asked.values()]
        if engines := [engine for engine in self._fleet.live if engine.joined]:
            return min(engines, key=busy.count)
        raise self._fleet.failure or EngineDiedError(f"no {self._kind.noun} has weights: all of them restart")

    async def _answered(self, engine: StartedEngine, answer: Any) -> list[Response]:
        """Return what the engine gives, as long as it gets on."""
        watch, limit_s = engine.watch, self._kind.call_timeout_s
        watch.tick()
        watch.moved()

        def over() -> str | None:
            if engine.version is not None:  # else it waits for the end of a refit, which it cannot help
                watch.tick()
            if watch.due(LOOK_EVERY_S / 2):
                watch.look([0])
                if (lost := engine.process.lost()) is not None:
                    return lost
            if not watch.stalled([0], limit_s):
                return None
            key = f"{self._kind.section}.call_timeout_s"
            return f"made no progress for {limit_s:g} s ({key}), at {watch.doing(0) or 'nothing'!r}"

        try:
            return (await settled(answer, over)).result()
        except GivenUpError as why:
            raise self._gone(engine, str(why)) from None

    async def _failed(self, engine: StartedEngine, failure: RankFailure) -> Exception:
        """Return what a failed answer means: an engine that is gone, or one that has raised."""
        if failure.died or not await _is_well(engine):
            died = "died: " if failure.died else ""
            return self._gone(engine, f"{died}{failure.headline()}", failure.details())
        return EngineFailedError(self._message(engine, failure.headline(), failure.details()))

    def _gone(self, engine: StartedEngine, what: str, details: str = "") -> Exception:
        message = self._message(engine, what, details)
        self._fleet.lose(engine, WorkerError(message, Call("generate", group=self._kind.name)))
        return self._fleet.failure or EngineDiedError(message)

    def _message(self, engine: StartedEngine, what: str, details: str) -> str:
        return "\n".join(filter(None, [f"{engine.process}: {what}", details]))


async def _is_well(engine: StartedEngine) -> bool:
    try:
        async with asyncio.timeout(HEALTH_S):
            await asyncio.wrap_future(engine.process.handle.health.remote().future())
    except (RayError, TimeoutError):
        return False
    return True
