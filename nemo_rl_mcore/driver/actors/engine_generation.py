"""The driver's handle for engines of any kind: sends them weights and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Protocol

import torch

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.validation import BatchCheck, check_lengths
from nemo_rl_mcore.driver.actors.actor import RayEngines
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_fleet import EngineFleet, StartedEngine, place_engines, transport_of
from nemo_rl_mcore.driver.actors.failures import WorkerCall, WorkerError
from nemo_rl_mcore.driver.actors.places import Placement
from nemo_rl_mcore.engine.engine import (
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


class WeightSource(Protocol):
    incarnation: int

    @property
    def placement(self) -> Placement: ...
    def gpus(self) -> Sequence[str]: ...
    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None: ...
    def prepare_for_lp_inference(self) -> None: ...
    def send_weights(self) -> Digests: ...


class EngineGeneration(AbstractContextManager["EngineGeneration"]):
    """Engines outside the ranks, with a copy of a policy's weights; implements `GenerationInterface`.

    In asynchronous runs they answer single groups while the ranks train and weights change: one asyncio loop calls
    `respond`, while other threads call the other methods. `generate` distributes the rows of a batch over all engines,
    with one version; `respond` sends a group to one engine, which answers with whatever weights it holds.

    Engines start when they first get weights. An engine that dies, hangs or holds wrong weights is restarted alone, up
    to the kind's limit of restarts; beyond it the run ends with a WorkerError. A restarted engine receives weights with
    the next update, or in `rejoin`. A row's noise is independent of the engine that answers and of the time.

    stop_ids: token ids that end a response and belong to it. seed: the noise's seed. starting: a context manager around
    the engines' first start. check: a function called once, when all engines first have weights; its errors propagate
    from `update_weights`.
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
        self._fleet = EngineFleet(kind, cluster, lambda: self._changed())
        self._source = source
        self._makes_room = config.offload != "none" and config.generation.takes_turns
        self._transport = transport_of(cluster, config.generation)
        self._connected: tuple[int, list[StartedEngine]] | None = None
        self._has_refitted = False
        self.weights_version: int | None = None
        self.weights_digest = ""
        """Digest of the last weights sent, if refits are verified; see `refit.digests.of_all`."""
        self._starting, self._check = starting, check
        self._changed: Callable[[], None] = lambda: None

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
            answers = self._fleet.run(
                rows, "generate", own=own, sampling=sampling, version=version, context=context
            )
            for engine, responses in answers.items():
                answered.update(zip(rows[engine], responses, strict=True))
        return as_batch([answered[row] for row in range(len(requests))], sampling.max_new_tokens)

    def next_logprobs(
        self, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[Sequence[NextLogprobs]]:
        """Return, per engine and prompt, the log-probabilities [V] of all next tokens at the temperature."""
        answers: dict[StartedEngine, Sequence[NextLogprobs]] = {}
        while not answers:
            engines = self._ready()
            answers = self._fleet.run(engines, "next_logprobs", prompts=prompts, temperature=temperature)
        return [*answers.values()]

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        """Answer one group of rows like `generate`; cancelling the task cancels the group.

        ticket: the group's name in messages and in the engine. Raises EngineFailedError if the engine cannot answer,
        EngineDiedError if it is lost; any other RunStoppedError ends the run.
        """
        sampling = Sampling.of(self._config, self._stop_ids, greedy=False)
        responses = await self._fleet.respond(self._requests(data, step), sampling, ticket)
        return as_batch(responses, sampling.max_new_tokens)

    def whereabouts(self, ticket: str) -> str:
        """Return the engine that answers a group and its last activity, or an empty text; callable from any thread."""
        return self._fleet.whereabouts(ticket)

    @property
    def answering(self) -> bool:
        """Whether an engine has weights, so that groups can be answered."""
        return any(engine.joined for engine in self._fleet.live)

    @property
    def joining(self) -> bool:
        """Whether `rejoin` must be called: a restarted engine has no weights, or the run must end."""
        return self._fleet.failure is not None or not all(engine.joined for engine in self._fleet.live)

    @property
    def restarts(self) -> int:
        return self._fleet.restarts

    def listen(self, changed: Callable[[], None]) -> None:
        """Register a callback for changes of `answering` and `joining`; it may be called from any thread."""
        self._changed = changed

    def rejoin(self) -> None:
        """Send the last version's weights to restarted engines, while the others continue to answer.

        Must be called between calls to the ranks, while their weights still have that version. Raises the error that
        ends the run.
        """
        while behind := [engine for engine in self._fleet.live if engine.version != self.weights_version]:
            assert self.weights_version is not None  # engines can only be behind once there is a version
            self._send(behind, self.weights_version)
        if self._fleet.failure is not None:
            raise self._fleet.failure

    def offload(self) -> None:
        if self._kind.sleeps:
            awake = [engine for engine in self._fleet.live if not engine.asleep]
            for engine in self._fleet.run(awake, "sleep"):
                engine.asleep, engine.version = True, None

    def __exit__(self, *_: object) -> None:
        self._fleet.shutdown()

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
        if self._makes_room and all(engine.asleep for engine in self._fleet.live):
            # Ranks that share the engines' devices keep only a refit's data there, even before the first start, when
            # engines measure the free memory.
            self._source.prepare_for_lp_inference()
        if self._fleet.placement is None:
            with self._starting():
                colocated, ranks = self._config.generation.colocated, self._source.placement
                placed = place_engines(self._cluster, self._kind, colocated, ranks, self._source.gpus())
                self._fleet.placement = placed
                numbers = [*dict.fromkeys(slot.rank for slot in placed.slots)]
                self._fleet.start(numbers)
                self._fleet.wait(len(numbers))
        while True:
            engines = self._fleet.wait()
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
        begun = self._fleet.run(ready, "begin_refit", version, context=context)
        if len(begun) < len(ready):
            return  # the ranks would send to lost engines
        try:
            sent = self._source.send_weights()
        except (WorkerError, EngineLostError) as error:
            cause, lost = error.cause if isinstance(error, WorkerError) else error, False
            ranks_serve = not isinstance(error, WorkerError) or error.usable
            for engine in ready if ranks_serve else ():
                ill = self._fleet.illness(engine, "send_weights")
                if ill is None and isinstance(cause, EngineLostError) and cause.engine == engine.number:
                    ill = WorkerError(str(cause), WorkerCall("load_bucket", context, group=self._kind.name))
                if ill is not None:
                    self._fleet.lose(engine, ill)
                    lost = True
            if lost:
                return
            self._connected = None  # ranks or engines may differ in the next refit
            raise
        # A failure in a run's first refit would also occur after a restart.
        again = self._has_refitted and self._fleet.budget.left() > 0
        finished = self._fleet.run(ready, "finish_refit", version, sent, or_lose=again, context=context)
        for engine in self._wake(finished, "kv_cache", context):
            engine.version, engine.joined, engine.asleep = version, True, False
            self._has_refitted = True
        self.weights_digest = of_all(sent)

    def _wake(self, engines: Iterable[StartedEngine], tag: str, context: str) -> list[StartedEngine]:
        asleep = [engine for engine in engines if engine.asleep]
        woken = self._fleet.run(asleep, "wake_up", [tag], context=context) if asleep else {}
        return [engine for engine in engines if not engine.asleep or engine in woken]

    def _connect(self, engines: Sequence[StartedEngine]) -> bool:
        """Connect the ranks with these engines if necessary; return False if one is lost meanwhile or none is left."""
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
            joined = self._fleet.run(
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

    weight_versions: the version of the weights that sampled each token, -1 after the end.
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
    return BatchedDataDict(
        tokens=tokens_BT,
        logprobs=logprobs_BT,
        lengths=torch.tensor([len(response.tokens) for response in responses], dtype=torch.long),
        finished=torch.tensor([response.finished for response in responses], dtype=torch.bool),
        weight_versions=versions_BT,
        digests=torch.tensor([response.digest for response in responses], dtype=torch.long),
    )
