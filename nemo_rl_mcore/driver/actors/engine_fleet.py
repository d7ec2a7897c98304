"""The engines of a run, each a gang of which one worker is called, in a pool that restarts those that are lost.

Runs in the driver. Who restarts an engine: `lose`, called by whoever has found it dead, hung or without weights, ends
it, and a thread of `pool.Pool` starts another one, as long as the kind's `max_restarts` lasts. The thread that trains
makes the calls that reach all engines (`run`), that of asynchronous rollouts asks single ones (`engine_requests`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.driver.actors.actor import Actor, HealthWatch
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.actors.placement import Placement
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.engine.engine import EngineKind

HEALTH_S = 10.0
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
        """See `Member.number`."""
        return self.process.number

    def end(self) -> None:
        """See `Member.end`."""
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
        self._kind, self._cluster, self._place = kind, cluster, place
        self._placement: Placement | None = None
        budget = Budget(
            kind.max_restarts,
            kind.restart_backoff_s,
            _LONGEST_BACKOFF_S,
            lambda _: current_stop_signals().asked,
            self._report_restart,
            spent=f"{kind.section}.max_restarts: {kind.max_restarts} in a run, of which none is left",
        )
        waits = kind.sleeps
        super().__init__(
            kind.noun, self._start_engine, budget, lost=cluster.lost, changed=changed, in_wait=waits
        )

    @property
    def started(self) -> bool:
        """Say whether `start_all` has been called."""
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
            engine.group.run_all("health", context=f"after a failure of {after}", timeout_s=HEALTH_S, key="")
        except WorkerError as error:
            return error
        return None

    def shutdown(self) -> None:
        """See `Pool.shutdown`; gives the engines' places back."""
        super().shutdown()
        if self._placement is not None and self._cluster.lost() is None:
            self._placement.release()

    def _start_engine(self, number: int) -> StartedEngine:
        kind = self._kind
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
            f"{self._kind.noun} {number} restarts in {delay_s:g} s, {self.budget.left()} restarts left "
            f"({self._kind.section}.max_restarts): {str(error).splitlines()[0]}",
        )
