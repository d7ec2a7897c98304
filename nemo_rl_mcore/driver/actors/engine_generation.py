"""The driver's handle of engines of any kind: gives them weights and asks them, whichever of them live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import TracebackType
from typing import Self

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.lengths import check_lengths
from nemo_rl_mcore.data.validation import BatchCheck
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_fleet import EngineFleet, StartedEngine
from nemo_rl_mcore.driver.actors.engine_placement import place_engines
from nemo_rl_mcore.driver.actors.engine_refits import EngineRefits, WeightSource
from nemo_rl_mcore.driver.actors.engine_requests import EngineRequests
from nemo_rl_mcore.engine.engine import (
    EngineKind,
    NextLogprobs,
    Response,
    Sampling,
    WrongWeightsError,
    as_batch,
    as_requests,
)
from nemo_rl_mcore.ops.sampling import sample_keys


class EngineGeneration:
    """Implements `interfaces.RolloutEngines` over engines that hold a copy of a policy's weights.

    Engines start when they are first given weights. One that dies, hangs or does not hold what it was sent restarts
    next to the others, as often as the kind's restarts allow; then the run ends with a WorkerError. It gets the weights
    with the next update, or in `rejoin`. The noise of a row does not depend on who answers it, nor on when.

    Args:
        kind: what the engines are.
        config: the policy section.
        cluster: the session that places the engines.
        source: where the weights come from.
        stop_ids: token ids that end a response and belong to it.
        seed: of the noise.
        starting: entered around the first start of the engines.
        check: called once, when the engines first have weights, before anybody is answered; what it raises ends that
            first `update_weights`.

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
        self._fleet = EngineFleet(
            kind,
            cluster,
            lambda: place_engines(
                cluster, kind, config.generation.colocated, source.placement, source.gpus()
            ),
            lambda: self._changed(),
        )
        self._refits = EngineRefits(self._fleet, kind, config, cluster, source)
        self._requests = EngineRequests(self._fleet, kind)
        self._version: int | None = None
        self._starting, self._check = starting, check
        self._changed: Callable[[], None] = lambda: None

    @property
    def weights_digest(self) -> str:
        """Return the digest of the weights given last, where refits are verified; see `refit.verification.of_all`."""
        return self._refits.digest

    @property
    def weights_version(self) -> int | None:
        """Return the version of the weights given last; None before the first."""
        return self._version

    def update_weights(self, version: int) -> None:
        """See `interfaces.GenerationInterface.update_weights`."""
        self._version = version
        self._ready()
        if self._check is not None:
            self._check(self)
            self._check = None

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`.

        Besides, weight_versions int64 [B, T]: of the weights that sampled a token, -1 after the end. What was asked of
        an engine that is lost is asked again, of those that live then.
        """
        asked = self._keyed(data, step)
        sampling = Sampling.of(self._config, self._stop_ids, greedy=greedy)
        answered: dict[int, Response] = {}
        while missing := [row for row in range(asked.size) if row not in answered]:
            rows = _shares(missing, self._ready())
            answers = self._fleet.run(
                rows,
                "generate",
                own={
                    engine: {"requests": as_requests(asked.select_indices(share))}
                    for engine, share in rows.items()
                },
                sampling=sampling,
                version=self._version,
                context=f"step {step}",
            )
            for engine, responses in answers.items():
                answered.update(zip(rows[engine], responses, strict=True))
        return as_batch([answered[row] for row in range(asked.size)], sampling.max_new_tokens)

    def next_logprobs(
        self, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[Sequence[NextLogprobs]]:
        """Ask each engine that lives; see `Engine.next_logprobs`."""
        answers: dict[StartedEngine, Sequence[NextLogprobs]] = {}
        while not answers:
            engines = self._ready()
            answers = self._fleet.run(engines, "next_logprobs", prompts=prompts, temperature=temperature)
        return [*answers.values()]

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        """See `interfaces.RolloutEngines.respond`; raises EngineFailedError, or what ends the run."""
        sampling = Sampling.of(self._config, self._stop_ids, greedy=False)
        responses = await self._requests.respond(as_requests(self._keyed(data, step)), sampling, ticket)
        return as_batch(responses, sampling.max_new_tokens)

    def whereabouts(self, ticket: str) -> str:
        """See `interfaces.RolloutEngines.whereabouts`."""
        return self._requests.whereabouts(ticket)

    @property
    def answering(self) -> bool:
        """See `interfaces.RolloutEngines.answering`."""
        return any(engine.joined for engine in self._fleet.live)

    @property
    def joining(self) -> bool:
        """See `interfaces.RolloutEngines.joining`."""
        return self._fleet.failure is not None or not all(engine.joined for engine in self._fleet.live)

    @property
    def restarts(self) -> int:
        """See `interfaces.RolloutEngines.restarts`."""
        return self._fleet.restarts

    def listen(self, changed: Callable[[], None]) -> None:
        """See `interfaces.RolloutEngines.listen`."""
        self._changed = changed

    def rejoin(self) -> None:
        """See `interfaces.RolloutEngines.rejoin`."""
        while behind := self._behind(self._fleet.live):
            self._refits.send(behind, self._held_version())
        self._fleet.raise_failure()

    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`: engines that share the ranks' GPUs give their memory back."""
        if self._kind.sleeps:
            awake = [engine for engine in self._fleet.live if not engine.asleep]
            for engine in self._fleet.run(awake, "sleep"):
                engine.asleep, engine.version = True, None

    def shutdown(self) -> None:
        """End the engines; idempotent."""
        self._fleet.shutdown()

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _keyed(self, data: BatchedDataDict, step: int) -> BatchedDataDict:
        """Return the prompts with the key of each row's noise."""
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        keys = sample_keys(
            self._seed, step, data["prompt_index"], data["sample_index"], data.get("turn_index")
        )
        return BatchedDataDict(
            input_ids=data["input_ids"],
            input_lengths=data["input_lengths"],
            seeds=keys,
            stop_strings=data.get("stop_strings", [()] * data.size),
        )

    def _held_version(self) -> int:
        if self._version is None:
            raise WrongWeightsError("the engines have not been given weights: call update_weights first")
        return self._version

    def _behind(self, engines: Sequence[StartedEngine]) -> list[StartedEngine]:
        return [engine for engine in engines if engine.version != self._version]

    def _ready(self) -> Sequence[StartedEngine]:
        """Return the engines that live, at least one, all with the current weights."""
        version = self._held_version()
        if all(engine.asleep for engine in self._fleet.live):
            self._refits.make_room()  # before the first one starts, too, which asks how much is free
        if not self._fleet.started:
            with self._starting():
                self._fleet.start_all()
        while behind := self._behind(engines := self._fleet.wait()):
            self._refits.send(behind, version)
        return engines


def _shares(rows: Sequence[int], engines: Sequence[StartedEngine]) -> dict[StartedEngine, Sequence[int]]:
    """Give a share of the rows, in order, to each engine that gets any."""
    bounds = [len(rows) * place // len(engines) for place in range(len(engines) + 1)]
    shares = (rows[first:end] for first, end in pairwise(bounds))
    return {engine: share for engine, share in zip(engines, shares, strict=True) if share}
