"""Groups of requests to one engine each, asked from an asyncio loop beside the calls that reach all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from nemo_rl_mcore.generation.engine import (
    EngineFailedError,
    EngineKind,
    Request,
    Response,
    Sampling,
)
from nemo_rl_mcore.workers.failures import RankFailure
from nemo_rl_mcore.workers.rank_calls import HealthWatch
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup

_LOOK_EVERY_S = 1.0


class EngineRequests:
    """Each group goes to the engine that answers the fewest; one loop at a time asks.

    An engine that makes no progress for `call_timeout_s` of its kind fails what it was asked, as one that dies does;
    one that has died is not asked again. A task that is cancelled gives its group up.
    lost: says what of Ray itself has died.
    """

    def __init__(self, engines: RayWorkerGroup, kind: EngineKind, lost: Callable[[], str | None]) -> None:
        self._engines, self._kind, self._lost = engines, kind, lost
        self._watches = [HealthWatch([actor]) for actor in engines.actors]
        self._asked: dict[str, int] = {}
        self._dead: set[int] = set()

    async def respond(self, requests: Sequence[Request], sampling: Sampling, ticket: str) -> list[Response]:
        """Answer a group with whatever weights the engine holds while it draws.

        Raises EngineFailedError, naming the engine.
        """
        engine = self._least_busy()
        self._asked[ticket] = engine
        try:
            answer = self._engines.actors[engine].generate.remote(requests, sampling, None, ticket)
            return await self._answered(engine, answer)
        except asyncio.CancelledError:
            self._engines.actors[engine].cancel.remote(ticket)
            raise
        except RayError as error:
            if not isinstance(error, RayTaskError):
                self._dead.add(engine)
            failure = RankFailure(engine, self._engines.identities[engine], error)
            raise self._failed(engine, failure.headline(), failure.details()) from None
        finally:
            del self._asked[ticket]

    def whereabouts(self, ticket: str) -> str:
        """The engine that a group was sent to, and what it said last; empty where it is with none."""
        engine = self._asked.get(ticket)
        if engine is None:
            return ""
        doing = self._watches[engine].doing(0) or "nothing"
        return f"{self._kind.noun} {engine} ({self._engines.identities[engine]}), at {doing!r}"

    def _least_busy(self) -> int:
        """Of the engines that live; of all, so that one of them says what it died of, when none does."""
        busy, engines = [*self._asked.values()], range(len(self._watches))
        return min([engine for engine in engines if engine not in self._dead] or engines, key=busy.count)

    async def _answered(self, engine: int, answer: Any) -> list[Response]:
        """What the engine gives, as long as it gets on."""
        watch, limit_s = self._watches[engine], self._kind.call_timeout_s
        future = asyncio.wrap_future(answer.future())
        watch.tick()
        watch.moved()
        while not (await asyncio.wait([future], timeout=_LOOK_EVERY_S))[0]:
            watch.tick()
            if watch.due(_LOOK_EVERY_S / 2):
                watch.look([0])
                if (lost := self._lost()) is not None:
                    raise self._failed(engine, lost)
            if watch.stalled([0], limit_s):
                key = f"{self._kind.section}.call_timeout_s"
                doing = watch.doing(0) or "nothing"
                raise self._failed(engine, f"made no progress for {limit_s:g} s ({key}), at {doing!r}")
        return future.result()

    def _failed(self, engine: int, what: str, details: str = "") -> EngineFailedError:
        identity = self._engines.identities[engine]
        return EngineFailedError(
            "\n".join(filter(None, [f"{self._kind.noun} {engine} ({identity}): {what}", details]))
        )
