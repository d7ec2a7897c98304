"""The engines of a run, each a gang of which one worker is called, in a pool that restarts those that are lost.

Runs in the driver. Who restarts an engine: `lose`, called by whoever has found it dead, hung or without weights, ends
it, and a thread of `pool.Pool` starts another one, as long as the kind's `max_restarts` lasts. The thread that trains
makes the calls that reach all engines (`run`), that of asynchronous rollouts asks single ones (`EngineRequests`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ray.exceptions import RayError

from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, GivenUpError, HealthWatch, settled
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import RankFailure, WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.actors.places import Placement
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.engine.engine import (
    EngineDiedError,
    EngineFailedError,
    EngineKind,
    Request,
    Response,
    Sampling,
)

_HEALTH_S = 10.0
"""Within which an engine that is well says so."""
_LONGEST_BACKOFF_S = 60.0


@dataclass(eq=False)
class StartedEngine:
    """An engine that runs; one that restarts in its place is another one. A `Member` of a pool.

    watch: of its health, for those who wait for single answers. version: of the weights that it holds, None before the
    first and while a refit is under way or has broken off. joined: whether it has ever held some, and may be asked to
    answer. asleep: whether training has its memory.
    """

    group: RayWorkerGroup
    process: Actor
    watch: HealthWatch
    version: int | None = None
    joined: bool = False
    asleep: bool = False

    @property
    def number(self) -> int:
        return self.process.number

    def end(self) -> None:
        self.group.shutdown()


class EngineFleet(Pool[StartedEngine]):
    """Pool of the engines: starts them, and calls those that live.

    Engines that share the ranks' memory are replaced while it is theirs: in `wait`. Any thread may call any method, but
    each engine takes one call at a time.

    place: gives a slot for each engine, which `shutdown` gives back. changed: see `Pool`.
    """

    def __init__(
        self,
        kind: EngineKind,
        cluster: RayCluster,
        place: Callable[[], Placement],
        changed: Callable[[], None],
    ) -> None:
        self.kind = kind
        self._cluster, self._place = cluster, place
        self._placement: Placement | None = None
        budget = Budget(
            kind.max_restarts,
            kind.restart_backoff_s,
            _LONGEST_BACKOFF_S,
            lambda _: current_stop_signals().asked,
            self._report_restart,
            spent=f"{kind.section}.max_restarts: {kind.max_restarts} in a run, of which none is left",
        )
        super().__init__(
            kind.noun, self._start_engine, budget, lost=cluster.lost, changed=changed, in_wait=kind.sleeps
        )

    @property
    def started(self) -> bool:
        return self._placement is not None

    def start_all(self) -> None:
        """Start all engines; raises what the first one that failed has raised."""
        self._placement = self._place()
        numbers = [*dict.fromkeys(slot.rank for slot in self._placement.slots)]
        self.start(numbers)
        self.wait(len(numbers))

    def run(
        self,
        engines: Iterable[StartedEngine],
        method: str,
        *args: Any,
        own: Mapping[StartedEngine, Mapping[str, Any]] | None = None,
        or_lose: bool = False,
        **options: Any,
    ) -> dict[StartedEngine, Any]:
        """Call a method on each at once, with arguments common to all and each one's own; see `RayWorkerGroup.call`.

        Gives the answers of those that were not lost. Raises what an engine raised that is well otherwise, once all
        have answered; or_lose: that one is lost, too.
        """
        answers: dict[StartedEngine, Any] = {}
        failures: list[WorkerError] = []
        with deferred_stop_signals():
            calls = {}
            for engine in engines:
                try:
                    calls[engine] = engine.group.call(method, *args, **(own or {}).get(engine, {}), **options)
                except WorkerError as error:
                    self.lose(engine, error)
            for engine, call in calls.items():
                try:
                    [answers[engine]] = call.result()
                except WorkerError as error:
                    lost = error if or_lose or not error.usable else self.illness(engine, method)
                    if lost is None:
                        failures.append(error)
                    else:
                        self.lose(engine, lost)
        if failures:
            raise failures[0]
        return answers

    def illness(self, engine: StartedEngine, after: str) -> WorkerError | None:
        """Ask an engine for its health after a failure, and return what is wrong with it; None if it is well."""
        try:
            engine.group.run_all("health", context=f"after a failure of {after}", timeout_s=_HEALTH_S, key="")
        except WorkerError as error:
            return error
        return None

    def shutdown(self) -> None:
        super().shutdown()
        if self._placement is not None and self._cluster.lost() is None:
            self._placement.release()

    def _start_engine(self, number: int) -> StartedEngine:
        kind = self.kind
        assert self._placement is not None  # `start_all` has made it
        slots = tuple(slot for slot in self._placement.slots if slot.rank == number)
        group = RayWorkerGroup(
            kind.engine,
            self._cluster,
            (kind.settings,),
            start_timeout_s=kind.start_timeout_s,
            call_timeout_s=kind.call_timeout_s,
            deadline_keys=kind.section,
            placement=Placement(slots),
            name=kind.name,
            noun="engine",
            share_class=kind.share,
            lost=lambda: "the run" if self.closed else self._cluster.lost(),
        )
        process, *_ = group.members  # the others are its shares on further machines
        return StartedEngine(group, process, HealthWatch([process.handle]))

    def _report_restart(self, number: int, delay_s: float, error: Exception) -> None:
        write_line(
            sys.stderr,
            f"{self.kind.noun} {number} restarts in {delay_s:g} s, {self.budget.left()} restarts left "
            f"({self.kind.section}.max_restarts): {str(error).splitlines()[0]}",
        )


class EngineRequests:
    """Sends groups of requests, each to the engine that answers the fewest; one asyncio loop at a time asks.

    Several calls of a group, such as those of agents that play its samples, may be under way at once.
    An engine that dies, or makes no progress for `call_timeout_s` of its kind, is lost to the fleet. A task that is
    cancelled gives its group up.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet, self._kind = fleet, fleet.kind
        self._asked: dict[str, tuple[str, StartedEngine]] = {}
        """By the name that the engine knows a call by, its ticket and its engine."""
        self._calls = count(1)

    async def respond(self, requests: Sequence[Request], sampling: Sampling, ticket: str) -> list[Response]:
        """Answer a group with whatever weights the engine holds while it draws.

        Raises EngineFailedError, naming the engine: EngineDiedError where that one is gone or none is there, but others
        start; what ends the run where none does.
        """
        busy = [engine for _, engine in self._asked.values()]
        if not (engines := [engine for engine in self._fleet.live if engine.joined]):
            raise self._fleet.failure or EngineDiedError(
                f"no {self._kind.noun} has weights: all of them restart"
            )
        engine, name = min(engines, key=busy.count), f"{ticket}, call {next(self._calls)}"
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
            raise self._gone(engine, f"{engine.process}: {why}") from None

    async def _failed(self, engine: StartedEngine, failure: RankFailure) -> Exception:
        """Return what a failed answer means: an engine that is gone, or one that has raised."""
        died = failure.died
        if not died:
            try:
                async with asyncio.timeout(_HEALTH_S):
                    await asyncio.wrap_future(engine.process.handle.health.remote().future())
            except (RayError, TimeoutError):
                died = True
        what = f"{'died: ' if failure.died else ''}{failure.headline()}"
        message = "\n".join(filter(None, [f"{engine.process}: {what}", failure.details()]))
        return self._gone(engine, message) if died else EngineFailedError(message)

    def _gone(self, engine: StartedEngine, message: str) -> Exception:
        self._fleet.lose(engine, WorkerError(message, WorkerCall("generate", group=self._kind.name)))
        return self._fleet.failure or EngineDiedError(message)
