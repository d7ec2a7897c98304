"""A run's pool of engines, which restarts lost ones; each engine is a gang whose first worker takes the calls.

They are separate processes on CPU, on the ranks' GPUs, or on separate GPUs. An engine has a slot on each machine that
runs its processes; the driver calls the first. `lose` ends an engine that is dead, hung or without weights; a thread of
`pool.Pool` starts a replacement, at most the kind's `max_restarts` times. The training thread calls all engines
(`run`); the thread for asynchronous rollouts calls single engines (`respond`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config.generation import ColocatedConfig, GenerationConfig
from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, GivenUpError, HealthWatch, settled
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup
from nemo_rl_mcore.driver.actors.places import Placement, RankSlot, rank_environment
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.engine.engine import (
    EngineDiedError,
    EngineFailedError,
    EngineKind,
    EngineMachines,
    Request,
    Response,
    Sampling,
)

_HEALTH_S = 10.0
"""Seconds within which a healthy engine answers."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_START_WITHIN_S = 600.0


@dataclass(eq=False)
class StartedEngine:
    """A running engine, as a `Member` of a pool; a restart replaces it by a new object.

    watch: the health watch for `respond`. version: the version of its weights; None before the first refit, during a
    refit, and after a failed one. joined: whether it has received weights and may answer. asleep: whether training uses
    its memory.
    """

    number: int
    group: RayWorkerGroup
    process: Actor
    watch: HealthWatch
    version: int | None = None
    joined: bool = False
    asleep: bool = False

    def end(self) -> None:
        self.group.shutdown()


class EngineFleet(Pool[StartedEngine]):
    """The pool of engines; those that share the ranks' memory are replaced only in `wait`, while the memory is free.

    Any thread may call any method, but an engine takes one call at a time, and one asyncio loop calls `respond`.
    """

    def __init__(self, kind: EngineKind, cluster: RayCluster, changed: Callable[[], None]) -> None:
        self.kind = kind
        self._cluster = cluster
        self.placement: Placement | None = None
        """Each engine's slots, which `shutdown` releases."""
        # Ticket and engine by the call's name in the engine.
        self._asked: dict[str, tuple[str, StartedEngine]] = {}
        self._calls = count(1)
        budget = Budget(
            kind.max_restarts,
            _FIRST_BACKOFF_S,
            _LONGEST_BACKOFF_S,
            lambda _: current_stop_signals().asked,
            lambda number, delay_s, error: write_line(
                sys.stderr,
                f"{kind.noun} {number} restarts in {delay_s:g} s, {self.budget.left()} restarts left "
                f"(policy.generation.max_restarts): {str(error).splitlines()[0]}",
            ),
            spent=f"policy.generation.max_restarts: {kind.max_restarts} in a run, of which none is left",
        )
        super().__init__(
            kind.noun, self._start_engine, budget, lost=cluster.lost, changed=changed, in_wait=kind.sleeps
        )

    def run(
        self,
        engines: Iterable[StartedEngine],
        method: str,
        *args: Any,
        own: Mapping[StartedEngine, Mapping[str, Any]] | None = None,
        or_lose: bool = False,
        **options: Any,
    ) -> dict[StartedEngine, Any]:
        """Call a method on all engines at once, with common and per-engine arguments; see `RayWorkerGroup.call`.

        Returns the answers of the surviving engines. An otherwise healthy engine's error is raised once all have
        answered; with or_lose, that engine is lost instead.
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
        """Check an engine's health after a failure; return its error, or None if it is healthy."""
        try:
            engine.group.run_all("health", context=f"after a failure of {after}", timeout_s=_HEALTH_S, key="")
        except WorkerError as error:
            return error
        return None

    def shutdown(self) -> None:
        super().shutdown()
        if self.placement is not None and self._cluster.lost() is None:
            self.placement.release()

    def _start_engine(self, number: int) -> StartedEngine:
        kind = self.kind
        assert self.placement is not None
        slots = tuple(slot for slot in self.placement.slots if slot.rank == number)
        group = RayWorkerGroup(
            kind.engine,
            self._cluster,
            (kind.settings,),
            start_timeout_s=_START_WITHIN_S,
            call_timeout_s=kind.call_timeout_s,
            placement=Placement(slots),
            name=kind.name,
            noun="engine",
            share_class=kind.share,
            lost=lambda: "the run" if self.closed else self._cluster.lost(),
        )
        process, *_ = group.members  # the other members are its shares on further machines
        return StartedEngine(number, group, process, HealthWatch([process.handle]))

    async def respond(self, requests: Sequence[Request], sampling: Sampling, ticket: str) -> list[Response]:
        """Answer a group on the least busy engine, with whatever weights it holds while sampling.

        A group may have several concurrent calls, such as from agents that play its samples. An engine
        that dies, or makes no progress for `call_timeout_s`, is lost. Cancelling the task cancels its group in the
        engine. Raises EngineFailedError, naming the engine; EngineDiedError if that engine is lost or no engine has
        weights while others are starting; the error that ends the run if none is starting.
        """
        busy = [engine for _, engine in self._asked.values()]
        if not (engines := [engine for engine in self.live if engine.joined]):
            raise self.failure or EngineDiedError(f"no {self.kind.noun} has weights: all of them restart")
        engine, name = min(engines, key=busy.count), f"{ticket}, call {next(self._calls)}"
        process, watch = engine.process, engine.watch
        self._asked[name] = ticket, engine
        try:
            answer = process.handle.generate.remote(requests, sampling, None, name)
            watch.due(0)
            watch.moved()
            return (await settled(answer, lambda: self._stuck(engine))).result()
        except asyncio.CancelledError:
            process.handle.cancel.remote(name)
            raise
        except GivenUpError as why:
            raise self._gone(engine, f"{process}: {why}") from None
        except RayError as error:
            failure = process.failure(error)
            gone = failure.died
            if not gone:
                try:
                    async with asyncio.timeout(_HEALTH_S):
                        await asyncio.wrap_future(process.handle.health.remote().future())
                except (RayError, TimeoutError):
                    gone = True
            what = f"{'died: ' if failure.died else ''}{failure.headline()}"
            message = "\n".join(filter(None, [f"{process}: {what}", failure.details()]))
            raise (self._gone(engine, message) if gone else EngineFailedError(message)) from None
        finally:
            del self._asked[name]

    def whereabouts(self, ticket: str) -> str:
        engines = dict.fromkeys(engine for asked, engine in (*self._asked.values(),) if asked == ticket)
        return "; ".join(f"{one.process}, at {one.watch.doing(0) or 'nothing'!r}" for one in engines)

    def _stuck(self, engine: StartedEngine) -> str | None:
        watch, limit_s = engine.watch, self.kind.call_timeout_s
        # An engine without a version is waiting for a refit to end, which is not its fault.
        if watch.due(LOOK_EVERY_S / 2, passes=engine.version is not None):
            watch.look([0])
            if (lost := engine.process.lost()) is not None:
                return lost
        if not watch.stalled([0], limit_s):
            return None
        return f"made no progress for {limit_s:g} s, at {watch.doing(0) or 'nothing'!r}"

    def _gone(self, engine: StartedEngine, message: str) -> Exception:
        self.lose(engine, WorkerError(message, WorkerCall("generate", group=self.kind.name)))
        return self.failure or EngineDiedError(message)


_CPU_SHARE_OF_AN_ENGINE = 0.1


def place_engines(
    cluster: RayCluster,
    kind: EngineKind,
    colocated: ColocatedConfig,
    ranks: Placement,
    rank_gpus: Sequence[str],
) -> Placement:
    """Return each engine's slots; rank_gpus: the training ranks' GPUs by rank, empty on CPU."""
    config, size, on_cpu = cluster.config, kind.processes, cluster.config.on_cpu
    environment = {**rank_environment(os.environ, on_cpu=on_cpu), **kind.environment}
    if on_cpu:
        environment |= cluster.local_network()
    if on_cpu and size <= config.workers_per_node:
        options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_AN_ENGINE, "num_gpus": 0}
        if not cluster.one_machine:
            options["scheduling_strategy"] = "SPREAD"  # a restarted engine's machine may be gone
        return Placement(tuple(RankSlot(engine, environment, options) for engine in range(kind.engines)))
    beside = on_cpu or colocated.enabled
    if beside:
        # Each engine shares the GPUs of as many consecutive ranks as it has processes.
        assert ranks.group is not None  # ranks on GPUs or on several machines have a group
        per_node, nodes, group = config.workers_per_node, config.num_nodes, ranks.group
    else:  # on GPUs that Ray reserves for them
        resources = colocated.resources
        per_node, nodes = resources.gpus_per_node or size * kind.engines, resources.num_nodes or 1
        group = cluster.reserve({"GPU": per_node, "CPU": per_node}, nodes)
    slots: list[RankSlot] = []
    for engine in range(kind.engines if beside and not rank_gpus else per_node * nodes // size):
        shares = shares_of(engine, size, per_node)
        # On CPU, engines are distributed over the machines in turn.
        machines = [node % nodes for node, _, _ in shares]
        addresses = [cluster.address_of(group, node) for node in machines] if len(shares) > 1 else []
        for number, (node, (_, first, places)) in enumerate(zip(machines, shares, strict=True)):
            own: dict[str, str] = {}
            if addresses:  # the rendezvous of its processes
                own = EngineMachines(addresses[0], addresses[number], number, len(shares)).environment()
            takes = {"num_cpus": 0, "num_gpus": 0} if beside else {"num_cpus": 1, "num_gpus": places}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            if beside:
                gpus = rank_gpus[node * per_node + first :][:places]
                own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            slots.append(RankSlot(engine, {**environment, **own}, {**takes, "scheduling_strategy": strategy}))
    return Placement(tuple(slots), None if beside else group)


def shares_of(engine: int, size: int, per_node: int) -> list[tuple[int, int, int]]:
    """Return, per engine and machine: the machine, the first place that its processes take, and their number.

    size: the number of processes per engine; engines fill the machines in order. per_node: the number of places per
    machine, a divisor or a multiple of `size`.
    """
    node, first = divmod(engine * size, per_node)
    if size <= per_node:
        return [(node, first, size)]
    return [(node + further, 0, per_node) for further in range(size // per_node)]


def transport_of(cluster: RayCluster, generation: GenerationConfig) -> str:
    if generation.refit_transport is not None:
        return generation.refit_transport
    if cluster.config.on_cpu:
        return "shared_memory" if cluster.one_machine else "ray"
    return "cuda_ipc" if generation.colocated.enabled else "nccl"
