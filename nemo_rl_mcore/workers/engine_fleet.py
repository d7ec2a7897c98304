"""The engines of a run, each in a worker group of its own, so that one which is lost starts anew alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.engine import EngineKind
from nemo_rl_mcore.generation.journal import ENGINE_NUMBER
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.failures import RankIdentity, WorkerError
from nemo_rl_mcore.workers.placement import Placement, RankSlot
from nemo_rl_mcore.workers.rank_calls import HealthWatch
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup

HEALTH_S = 10.0
"""Within which an engine that is well says so."""
_LONGEST_BACKOFF_S = 60.0
_STARTS_END_WITHIN_S = 15.0


@dataclass(eq=False)
class StartedEngine:
    """An engine that runs; one that starts anew in its place is another one.

    actor, identity: of its process, also once it is lost. watch: of its health, for those who wait for single answers.
    version: of the weights that it holds, None before the first and while a refit is under way or has broken off.
    joined: whether it has ever held some, and may be asked to answer. asleep: whether training has its memory.
    """

    number: int
    group: RayWorkerGroup
    actor: Any
    identity: RankIdentity
    watch: HealthWatch
    version: int | None = None
    joined: bool = False
    asleep: bool = False


class EngineFleet:
    """Starts engines, calls them, and starts those anew that are lost, while the kind's budget lasts.

    A lost engine is killed at once. The one in its place starts in a thread of its own after a back-off, which doubles
    with every restart of the run up to a minute, and is then `live`, without weights; nobody waits for it unless asked
    to. Engines that share the ranks' memory start while it is theirs: in `wait`. A start that fails is tried again from
    the same budget, but the first one of a run is not. Any thread may call any method, but each engine takes one call
    at a time.

    place: gives a slot for each engine, which `shutdown` gives back. changed: called from any thread, with nothing
    locked, when an engine has started, is lost, or the fleet has failed.
    """

    def __init__(
        self,
        kind: EngineKind,
        cluster: RayCluster,
        place: Callable[[], Placement],
        changed: Callable[[], None],
    ) -> None:
        self.failure: Exception | None = None
        """Why the run ends: an engine was lost, and no restart was left."""
        self.restarts = 0
        """Begun since the run started."""
        self._kind, self._cluster, self._place = kind, cluster, place
        self._placement: Placement | None = None
        self._live: dict[int, StartedEngine] = {}
        self._put_off: list[tuple[RankSlot, float]] = []
        self._changed, self._tell = threading.Condition(), changed
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def live(self) -> list[StartedEngine]:
        """The engines that run, as far as is known."""
        return sorted([*self._live.values()], key=lambda engine: engine.number)

    @property
    def restarts_left(self) -> int:
        """Of the run, over all engines."""
        return self._kind.max_restarts - self.restarts

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._placement is not None

    def start(self) -> None:
        """Start all engines; raises what the first one that failed has raised."""
        self._placement = self._place()
        for slot in self._placement.slots:
            self._begin_start(slot, None)
        self.wait(len(self._placement.slots))

    def wait(self, at_least: int = 1) -> list[StartedEngine]:
        """Those that live, once so many do; raises `failure`. Each start has its own deadline, and a last failure."""
        with self._changed:
            put_off, self._put_off = self._put_off, []
        for slot, delay_s in put_off:
            self._begin_start(slot, delay_s)
        if put_off:
            at_least = len(self._live) + len(put_off)
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(self._live) >= at_least)
        self.raise_failure()
        return self.live

    def raise_failure(self) -> None:
        """Raise `failure`, if there is one."""
        if self.failure is not None:
            raise self.failure

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
        """What an engine says, or does not say, that is asked for its health after a failure; None if it is well."""
        try:
            engine.group.run_all("health", context=f"after a failure of {after}", timeout_s=HEALTH_S, key="")
        except WorkerError as error:
            return error
        return None

    def lose(self, engine: StartedEngine, error: WorkerError) -> None:
        """Give up an engine that died, hangs or holds no weights, and start another one in its place; idempotent."""
        with self._changed:
            if self._live.get(engine.number) is not engine:
                return
            del self._live[engine.number]
            delay_s = self._next_delay_s(engine.number, error)
        engine.group.shutdown()
        [slot] = engine.group.placement.slots
        if delay_s is not None and self._kind.sleeps:
            self._put_off.append((slot, delay_s))
        elif delay_s is not None:
            self._begin_start(slot, delay_s)
        self._notify()

    def shutdown(self) -> None:
        """End all engines, also those that are starting; idempotent.

        Raises RunStoppedError when a start does not end.
        """
        self._closed.set()
        with self._changed:
            engines, self._live = self.live, {}
        for engine in engines:
            engine.group.shutdown()
        for thread in self._threads:
            thread.join(_STARTS_END_WITHIN_S)
            if thread.is_alive():
                raise RunStoppedError(f"the {thread.name} did not end within {_STARTS_END_WITHIN_S:g} s")
        self._threads.clear()
        if self._placement is not None and self._cluster.lost() is None:
            self._placement.release()

    def _next_delay_s(self, number: int, error: Exception) -> float | None:
        """Take one restart out of the budget and say when it is due; None, and the fleet has failed, if it must not."""
        if self.failure is not None or self._closed.is_set():
            return None
        kind = self._kind
        if not self.restarts_left:
            error.add_note(
                f"{kind.section}.max_restarts: {kind.max_restarts} in a run, of which none is left"
            )
        if not self.restarts_left or self._cluster.lost() is not None or current_stop_signals().asked:
            self.failure = error
            return None
        delay_s = min(_LONGEST_BACKOFF_S, kind.restart_backoff_s * 2.0**self.restarts)
        self.restarts += 1
        write_line(
            sys.stderr,
            f"{kind.noun} {number} starts anew in {delay_s:g} s, {self.restarts_left} restarts left "
            f"({kind.section}.max_restarts): {str(error).splitlines()[0]}",
        )
        return delay_s

    def _begin_start(self, slot: RankSlot, delay_s: float | None) -> None:
        name = f"start of {self._kind.noun} {slot.rank}"
        thread = threading.Thread(target=self._start, args=(slot, delay_s), name=name, daemon=True)
        with self._changed:
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _start(self, slot: RankSlot, delay_s: float | None) -> None:
        """Start an engine, again as long as that fails and a restart is left; without a delay it is the run's first."""
        while not self._closed.wait(delay_s or 0.0):
            try:
                group = self._build(slot)
            except Exception as error:  # noqa: BLE001  # raised by whoever waits, once no restart is left
                with self._changed:
                    if delay_s is None:
                        self.failure = self.failure or error
                    else:
                        delay_s = self._next_delay_s(slot.rank, error)
                if self.failure is not None:
                    break
            else:
                self._join(slot.rank, group)
                break
        self._notify()

    def _join(self, number: int, group: RayWorkerGroup) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._live[number] = StartedEngine(
                    number, group, group.actors[0], group.identities[0], HealthWatch(group.actors)
                )
                return
        group.shutdown()

    def _build(self, slot: RankSlot) -> RayWorkerGroup:
        kind = self._kind
        environment = {**slot.environment, ENGINE_NUMBER: str(slot.rank)}
        return RayWorkerGroup(
            kind.engine,
            self._cluster,
            (kind.settings,),
            start_timeout_s=kind.start_timeout_s,
            call_timeout_s=kind.call_timeout_s,
            deadline_keys=kind.section,
            placement=Placement((replace(slot, environment=environment),)),
            name=kind.name,
            noun="engine",
            lost=lambda: "the run" if self._closed.is_set() else self._cluster.lost(),
        )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._tell()
