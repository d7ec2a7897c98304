"""The driver's handle for engines of any kind: starts them, and sends them weights and requests.

Engines are separate processes on CPU, on the ranks' GPUs, or on separate GPUs. Each engine is a gang with a slot on
every machine that runs its processes; the driver calls the first. `EngineFleet.lose` ends an engine that is dead, hung
or without weights; a thread of `pool.Pool` starts a replacement, at most the kind's `max_restarts` times. The training
thread calls all engines (`run`); the thread for asynchronous rollouts calls single engines (`respond`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Protocol

import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.generation import ColocatedConfig, GenerationConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.data.validation import BatchCheck, check_lengths
from nemo_rl_mcore.driver.actors.actor import (
    LOOK_EVERY_S,
    Actor,
    GivenUpError,
    HealthWatch,
    RayEngines,
    settled,
)
from nemo_rl_mcore.driver.actors.cluster import LOCAL_NETWORK, RayCluster
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
    NextLogprobs,
    Request,
    Response,
    Sampling,
    WrongWeightsError,
)
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.rank.refit.digests import Digests, of_all
from nemo_rl_mcore.rank.refit.sender import BroadcastRendezvous, EngineLostError, Engines, RefitSettings

_HEALTH_S = 10.0
"""Seconds within which a healthy engine answers."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_START_WITHIN_S = 600.0


@dataclass(eq=False)
class StartedEngine:
    """A running engine, as a `Member` of a pool; a restart replaces it by a new object.

    watch: the health watch for `respond`. version: the weights' version; None before the first refit, during a refit,
    and after a failed one. joined: True once the engine has received weights and may answer. asleep: True while
    training uses the engine's memory.
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
            lambda _: bool(current_stop_signals().arrived),
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

        Returns the surviving engines' answers. An error of an otherwise healthy engine is raised once all engines have
        answered; with or_lose, the engine is lost instead.
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
        """Answer a group on the least busy engine, with the engine's current weights, which may change meanwhile.

        A group may have several concurrent calls, for example by agents that play its samples. An engine
        that dies, or makes no progress for `call_timeout_s`, is lost. Cancelling the task cancels its group in the
        engine. Raises EngineFailedError, naming the engine; EngineDiedError if that engine is lost, or no engine has
        weights while others are starting; the error that ends the run if no engine is starting.
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
        """Return the engines that answer a group, with their last activities; callable from any thread."""
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
    if on_cpu and cluster.one_machine:
        environment |= LOCAL_NETWORK
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
            if addresses:  # the rendezvous of its processes, see `vllm.engine.EngineMachines`
                own |= {"MASTER_ADDR": addresses[0], "NODE_ADDR": addresses[number]}
                own |= {"NODE_RANK": str(number), "NNODES": str(len(shares))}
            takes = {"num_cpus": 0, "num_gpus": 0} if beside else {"num_cpus": 1, "num_gpus": places}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            if beside:
                gpus = rank_gpus[node * per_node + first :][:places]
                own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            slots.append(RankSlot(engine, {**environment, **own}, {**takes, "scheduling_strategy": strategy}))
    return Placement(tuple(slots), None if beside else group)


def shares_of(engine: int, size: int, per_node: int) -> list[tuple[int, int, int]]:
    """Return, for each of an engine's machines: the machine, the engine's first place on it, and the number of places.

    size: processes per engine; engines fill the machines in order. per_node: places per machine, a divisor or a
    multiple of `size`.
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


class WeightSource(Protocol):
    """The part of a `Policy` that engines use."""

    incarnation: int
    placement: Placement

    def gpus(self) -> Sequence[str]: ...
    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None: ...
    def prepare_for_lp_inference(self) -> None: ...
    def send_weights(self) -> Digests: ...


class EngineGeneration(AbstractContextManager["EngineGeneration"]):
    """Engines outside the ranks, with a copy of a policy's weights; implements `GenerationInterface`.

    In asynchronous runs they answer single groups while the ranks train and weights change: one asyncio loop calls
    `respond`, while other threads call the other methods. `generate` distributes a batch's rows over all engines, with
    one version; `respond` sends a group to one engine, which answers with its current weights.

    Engines start when they first get weights. An engine that dies, hangs or holds wrong weights is restarted alone, up
    to the kind's limit of restarts; beyond it the run ends with a WorkerError. A restarted engine receives weights with
    the next update, or in `rejoin`. A row's noise is independent of the engine that answers and of the time.

    stop_ids: token ids that end a response and belong to it. seed: the noise's seed. starting: a context manager around
    the engines' first start. check: called once, by `update_weights`, when all engines first have weights. changed:
    called, from any thread, when `answering` or `joining` changes.
    """

    def __init__(
        self,
        kind: EngineKind,
        config: PolicyConfig,
        cluster: RayCluster,
        source: WeightSource,
        *,
        stop_ids: Sequence[int],
        seed: int,
        starting: Callable[[], AbstractContextManager[object]] = nullcontext,
        check: Callable[[EngineGeneration], None] | None = None,
    ) -> None:
        self._kind, self._config = kind, config
        self._stop_ids, self._seed = tuple(stop_ids), seed
        self._cluster = cluster
        self.fleet = EngineFleet(kind, cluster, lambda: self.changed())
        self._source = source
        self._makes_room = config.offload != "none" and config.generation.takes_turns
        self._transport = transport_of(cluster, config.generation)
        self._connected: tuple[int, list[StartedEngine]] | None = None
        self._has_refitted = False
        self.weights_version: int | None = None
        self.weights_digest = ""
        """Digest of the last weights sent, if refits are verified; see `refit.digests.of_all`."""
        self._starting, self._check = starting, check
        self.changed: Callable[[], None] = lambda: None

    def update_weights(self, version: int) -> None:
        self.weights_version = version
        self._ready()
        if self._check is not None:
            self._check(self)
            self._check = None

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts like `GenerationInterface.generate`, with the additional keys of `as_batch`.

        If an engine is lost, the remaining engines answer its rows.
        """
        requests = self._requests(data, step)
        sampling = Sampling.of(self._config, self._stop_ids, greedy=greedy)
        answered: dict[int, Response] = {}
        while missing := [row for row in range(len(requests)) if row not in answered]:
            engines = self._ready()
            bounds = [len(missing) * place // len(engines) for place in range(len(engines) + 1)]
            shares = (missing[first:end] for first, end in pairwise(bounds))
            rows = {engine: share for engine, share in zip(engines, shares, strict=True) if share}
            own = {one: {"requests": [requests[row] for row in share]} for one, share in rows.items()}
            version, context = self.weights_version, f"step {step}"
            answers = self.fleet.run(
                rows, "generate", own=own, sampling=sampling, version=version, context=context
            )
            for engine, responses in answers.items():
                answered.update(zip(rows[engine], responses, strict=True))
        return as_batch([answered[row] for row in range(len(requests))], sampling.max_new_tokens)

    def next_logprobs(
        self, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[Sequence[NextLogprobs]]:
        """Return each engine's log-probabilities [V] of the next token, for every prompt, at the temperature."""
        answers: dict[StartedEngine, Sequence[NextLogprobs]] = {}
        while not answers:
            engines = self._ready()
            answers = self.fleet.run(engines, "next_logprobs", prompts=prompts, temperature=temperature)
        return [*answers.values()]

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        """Answer one group of rows like `generate`; cancelling the task cancels the group.

        ticket: the group's name in messages and in the engine. Raises EngineFailedError if the engine cannot answer,
        EngineDiedError if it is lost; any other RunStoppedError ends the run.
        """
        sampling = Sampling.of(self._config, self._stop_ids, greedy=False)
        responses = await self.fleet.respond(self._requests(data, step), sampling, ticket)
        return as_batch(responses, sampling.max_new_tokens)

    @property
    def answering(self) -> bool:
        """True if an engine has weights, so that groups can be answered."""
        return any(engine.joined for engine in self.fleet.live)

    @property
    def joining(self) -> bool:
        """True if `rejoin` must be called: a restarted engine has no weights, or the run must end."""
        return self.fleet.failure is not None or not all(engine.joined for engine in self.fleet.live)

    def rejoin(self) -> None:
        """Send the last version's weights to restarted engines, while the others continue to answer.

        Must be called between calls to the ranks, while their weights still have that version. Raises the error that
        ends the run.
        """
        while behind := [engine for engine in self.fleet.live if engine.version != self.weights_version]:
            assert self.weights_version is not None  # no engine is behind before the first version
            self._send(behind, self.weights_version)
        if self.fleet.failure is not None:
            raise self.fleet.failure

    def offload(self) -> None:
        if self._kind.sleeps:
            awake = [engine for engine in self.fleet.live if not engine.asleep]
            for engine in self.fleet.run(awake, "sleep"):
                engine.asleep, engine.version = True, None

    def __exit__(self, *_: object) -> None:
        self.fleet.shutdown()

    def _requests(self, data: BatchedDataDict, step: int) -> list[Request]:
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        turns = data.get("turn_index")
        return as_requests(
            BatchedDataDict(
                input_ids=data["input_ids"],
                input_lengths=data["input_lengths"],
                seeds=sample_keys(self._seed, step, data["prompt_index"], data["sample_index"], turns),
                stop_strings=data.get("stop_strings", [()] * data.size),
            )
        )

    def _ready(self) -> Sequence[StartedEngine]:
        if (version := self.weights_version) is None:
            raise WrongWeightsError("the engines have not been given weights: call update_weights first")
        if self._makes_room and all(engine.asleep for engine in self.fleet.live):
            # Ranks that share the engines' devices keep only a refit's data there, even before the first start, when
            # engines measure the free memory.
            self._source.prepare_for_lp_inference()
        if self.fleet.placement is None:
            with self._starting():
                colocated, ranks = self._config.generation.colocated, self._source.placement
                placed = place_engines(self._cluster, self._kind, colocated, ranks, self._source.gpus())
                self.fleet.placement = placed
                numbers = [*dict.fromkeys(slot.rank for slot in placed.slots)]
                self.fleet.start(numbers)
                self.fleet.wait(len(numbers))
        while True:
            engines = self.fleet.wait()
            if not (behind := [engine for engine in engines if engine.version != version]):
                return engines
            self._send(behind, version)

    def _send(self, engines: Sequence[StartedEngine], version: int) -> None:
        """Try once to send the source's weights to these engines; engines that receive them all get the version.

        The fleet restarts an engine lost during the refit, and the caller then tries again. Raises an error that occurs
        while all engines are healthy, such as a rank's.
        """
        context = f"weights of version {version}"
        for engine in engines:
            engine.version = None
        ready = self._wake(engines, "weights", context)
        if not self._connect(ready):
            return
        begun = self.fleet.run(ready, "begin_refit", version, context=context)
        if len(begun) < len(ready):
            return  # the ranks would send to lost engines
        try:
            sent = self._source.send_weights()
        except (WorkerError, EngineLostError) as error:
            cause, lost = error.cause if isinstance(error, WorkerError) else error, False
            ranks_serve = not isinstance(error, WorkerError) or error.usable
            for engine in ready if ranks_serve else ():
                ill = self.fleet.illness(engine, "send_weights")
                if ill is None and isinstance(cause, EngineLostError) and cause.engine == engine.number:
                    ill = WorkerError(str(cause), WorkerCall("load_bucket", context, group=self._kind.name))
                if ill is not None:
                    self.fleet.lose(engine, ill)
                    lost = True
            if lost:
                return
            self._connected = None  # ranks or engines may differ in the next refit
            raise
        # A failure in a run's first refit would also occur after a restart.
        again = self._has_refitted and self.fleet.budget.left() > 0
        finished = self.fleet.run(ready, "finish_refit", version, sent, or_lose=again, context=context)
        for engine in self._wake(finished, "kv_cache", context):
            engine.version, engine.joined, engine.asleep = version, True, False
            self._has_refitted = True
        self.weights_digest = of_all(sent)

    def _wake(self, engines: Iterable[StartedEngine], tag: str, context: str) -> list[StartedEngine]:
        asleep = [engine for engine in engines if engine.asleep]
        woken = self.fleet.run(asleep, "wake_up", [tag], context=context) if asleep else {}
        return [engine for engine in engines if not engine.asleep or engine in woken]

    def _connect(self, engines: Sequence[StartedEngine]) -> bool:
        """Connect the ranks with these engines if necessary; return False if any engine is lost or none is given."""
        wanted = (self._source.incarnation, [*engines])
        if not engines or self._connected == wanted:
            return bool(engines)
        self._connected = None
        kind, verify = self._kind, self._config.generation.verify_refit
        receivers = len(engines) * kind.processes
        sizes = kind.bucket_bytes, kind.call_timeout_s, receivers
        settings = RefitSettings(self._transport, *sizes, verify=verify, held_as=kind.precision)
        numbers = [engine.number for engine in engines]
        reached = RayEngines([engine.process.handle for engine in engines], kind.noun, numbers)
        rendezvous = self._source.connect_engines(reached, settings)
        if rendezvous is not None:
            joined = self.fleet.run(
                engines,
                "join_broadcast",
                own={engine: {"first_rank": 1 + at * kind.processes} for at, engine in enumerate(engines)},
                address=rendezvous.address,
                port=rendezvous.port,
                world_size=rendezvous.world_size,
                timeout_s=settings.timeout_s,
            )
            if len(joined) < len(engines):
                return False
        self._connected = wanted
        return True


def as_requests(data: BatchedDataDict) -> list[Request]:
    """Return the rows of input_ids [B, P] and input_lengths [B] without padding, with seeds [B] and stop_strings."""
    columns = [data[key].tolist() for key in ("input_ids", "input_lengths", "seeds")]
    rows = zip(*columns, data["stop_strings"], strict=True)
    return [Request(ids[:length], seed, strings) for ids, length, seed, strings in rows]


def as_batch(responses: Sequence[Response], max_new_tokens: int) -> BatchedDataDict:
    """Return a batch like `GenerationInterface.generate`, with weight_versions int64 [B, T] and digests int64 [B].

    weight_versions: the version of the weights that sampled each token, -1 after the end. With router replay also
    routed_experts, a list of each row's `Response.routes`.
    """
    tokens_BT = torch.zeros(len(responses), max_new_tokens, dtype=torch.long)
    logprobs_BT = torch.zeros(len(responses), max_new_tokens)
    versions_BT = torch.full_like(tokens_BT, -1)
    # numpy reads lists several times as fast as torch does.
    columns = [column.numpy() for column in (tokens_BT, logprobs_BT, versions_BT)]
    for row, response in enumerate(responses):
        of_tokens = (response.tokens, response.logprobs, response.versions)
        for column, values in zip(columns, of_tokens, strict=True):
            column[row, : len(response.tokens)] = values
    batch = BatchedDataDict(
        tokens=tokens_BT,
        logprobs=logprobs_BT,
        lengths=torch.tensor([len(response.tokens) for response in responses], dtype=torch.long),
        finished=torch.tensor([response.finished for response in responses], dtype=torch.bool),
        weight_versions=versions_BT,
        digests=torch.tensor([response.digest for response in responses], dtype=torch.long),
    )
    if any(response.routes is not None for response in responses):
        batch[ROUTED_EXPERTS] = [response.routes for response in responses]
    return batch
