"""The engines of a run, each a gang of which one worker is called, in a pool that restarts those that are lost.

They are separate processes on CPU, on the ranks' GPUs, or on separate GPUs. An engine has a slot on each machine that
has processes of it, the first of which the driver calls.

Runs in the driver. Who restarts an engine: `lose`, called by whoever has found it dead, hung or without weights, ends
it, and a thread of `pool.Pool` starts another one, as long as the kind's `max_restarts` lasts. The thread that trains
makes the calls that reach all engines (`run`), that of asynchronous rollouts asks single ones (`respond`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Within which an engine that is well says so."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_START_WITHIN_S = 600.0


@dataclass(eq=False)
class StartedEngine:
    """An engine that runs; one that restarts in its place is another one. A `Member` of a pool.

    watch: of its health, for those who wait for single answers. version: of the weights that it holds, None before the
    first and while a refit is under way or has broken off. joined: it has held some, and may be asked to answer.
    asleep: training has its memory.
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
    """Pool of the engines: starts them, and calls those that live.

    Engines that share the ranks' memory are replaced while it is theirs: in `wait`. Any thread may call any method, but
    each engine takes one call at a time, and one asyncio loop at a time asks by `respond`.

    changed: see `Pool`.
    """

    def __init__(self, kind: EngineKind, cluster: RayCluster, changed: Callable[[], None]) -> None:
        self.kind = kind
        self._cluster = cluster
        self.placement: Placement | None = None
        """A slot for each engine, which `shutdown` gives back."""
        # By the name that the engine knows a call by, its ticket and its engine.
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
                f"({kind.section}.max_restarts): {str(error).splitlines()[0]}",
            ),
            spent=f"{kind.section}.max_restarts: {kind.max_restarts} in a run, of which none is left",
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
        process, *_ = group.members  # the others are its shares on further machines
        return StartedEngine(number, group, process, HealthWatch([process.handle]))

    async def respond(self, requests: Sequence[Request], sampling: Sampling, ticket: str) -> list[Response]:
        """Have the engine that answers the fewest answer a group, with whatever weights it holds while it draws.

        Several calls of a group, such as those of agents that play its samples, may be under way at once. An engine
        that dies, or makes no progress for `call_timeout_s`, is lost. A task that is cancelled gives its group up.
        Raises EngineFailedError, naming the engine: EngineDiedError where that one is gone or none is there, but others
        start; what ends the run where none does.
        """
        busy = [engine for _, engine in self._asked.values()]
        if not (engines := [engine for engine in self.live if engine.joined]):
            raise self.failure or EngineDiedError(f"no {self.kind.noun} has weights: all of them restart")
        engine, name = min(engines, key=busy.count), f"{ticket}, call {next(self._calls)}"
        self._asked[name] = ticket, engine
        try:
            answer = engine.process.handle.generate.remote(requests, sampling, None, name)
            return await self._answered(engine, answer)
        except asyncio.CancelledError:
            engine.process.handle.cancel.remote(name)
            raise
        except RayError as error:
            failure = engine.process.failure(error)
            gone = failure.died
            if not gone:
                try:
                    async with asyncio.timeout(_HEALTH_S):
                        await asyncio.wrap_future(engine.process.handle.health.remote().future())
                except (RayError, TimeoutError):
                    gone = True
            what = f"{'died: ' if failure.died else ''}{failure.headline()}"
            message = "\n".join(filter(None, [f"{engine.process}: {what}", failure.details()]))
            raise (self._gone(engine, message) if gone else EngineFailedError(message)) from None
        finally:
            del self._asked[name]

    def whereabouts(self, ticket: str) -> str:
        engines = dict.fromkeys(engine for asked, engine in (*self._asked.values(),) if asked == ticket)
        return "; ".join(f"{one.process}, at {one.watch.doing(0) or 'nothing'!r}" for one in engines)

    async def _answered(self, engine: StartedEngine, answer: Any) -> list[Response]:
        watch, limit_s = engine.watch, self.kind.call_timeout_s
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
            return f"made no progress for {limit_s:g} s, at {watch.doing(0) or 'nothing'!r}"

        try:
            return (await settled(answer, over)).result()
        except GivenUpError as why:
            raise self._gone(engine, f"{engine.process}: {why}") from None

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
    """Return a slot for each engine; `rank_gpus` are the GPUs of the training ranks, by rank, and empty on CPU."""
    config, size, on_cpu = cluster.config, kind.processes, cluster.config.on_cpu
    environment = {**rank_environment(os.environ, on_cpu=on_cpu), **kind.environment}
    if on_cpu:
        environment |= cluster.local_network()
    if on_cpu and size <= config.workers_per_node:
        options: dict[str, Any] = {"num_cpus": _CPU_SHARE_OF_AN_ENGINE, "num_gpus": 0}
        if not cluster.one_machine:
            options["scheduling_strategy"] = "SPREAD"  # one that restarts may find its machine gone
        return Placement(tuple(RankSlot(engine, environment, options) for engine in range(kind.engines)))
    beside = on_cpu or colocated.enabled
    if beside:
        # Each is next to as many consecutive ranks as it has processes, on the GPUs that Ray has given those.
        assert ranks.group is not None  # ranks on GPUs, and on several machines, have one
        per_node, nodes, group = config.workers_per_node, config.num_nodes, ranks.group
    else:  # on GPUs that Ray reserves for them
        resources = colocated.resources
        per_node, nodes = resources.gpus_per_node or size * kind.engines, resources.num_nodes or 1
        group = cluster.reserve({"GPU": per_node, "CPU": per_node}, nodes)
    slots: list[RankSlot] = []
    for engine in range(kind.engines if beside and not rank_gpus else per_node * nodes // size):
        # On CPU engines may be many: they go round the machines.
        shares = [replace(share, node=share.node % nodes) for share in shares_of(engine, size, per_node)]
        addresses = [cluster.address_of(group, share.node) for share in shares] if len(shares) > 1 else []
        for number, share in enumerate(shares):
            own: dict[str, str] = {}
            if addresses:  # tells its processes how to meet
                own = EngineMachines(addresses[0], addresses[number], number, len(shares)).environment()
            takes = {"num_cpus": 0, "num_gpus": 0} if beside else {"num_cpus": 1, "num_gpus": share.count}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=share.node)
            if beside:
                first = share.node * per_node + share.first
                own["CUDA_VISIBLE_DEVICES"] = ",".join(rank_gpus[first : first + share.count])
            slots.append(RankSlot(engine, {**environment, **own}, {**takes, "scheduling_strategy": strategy}))
    return Placement(tuple(slots), None if beside else group)


@dataclass(frozen=True)
class Share:
    """The processes of an engine on one machine: `count` of them, from place `first` of the machine's on."""

    node: int
    first: int
    count: int


def shares_of(engine: int, size: int, per_node: int) -> tuple[Share, ...]:
    """Return where the processes of an engine are, `size` of each one, engine after engine over whole machines.

    per_node: places of a machine; it divides `size`, or is divided by it.
    """
    node, first = divmod(engine * size, per_node)
    if size <= per_node:
        return (Share(node, first, size),)
    return tuple(Share(node + further, 0, per_node) for further in range(size // per_node))


def transport_of(cluster: RayCluster, generation: GenerationConfig) -> str:
    if generation.refit_transport is not None:
        return generation.refit_transport
    if cluster.config.on_cpu:
        return "shared_memory" if cluster.one_machine else "ray"
    return "cuda_ipc" if generation.colocated.enabled else "nccl"
