"""The driver's handle of engines of any kind: starts them, sends them weights, asks them, and starts them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self, TypeVar

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.validation import BatchCheck
from nemo_rl_mcore.generation.engine import (
    EngineKind,
    NextLogprobs,
    Response,
    Sampling,
    WrongWeightsError,
    as_batch,
    as_requests,
)
from nemo_rl_mcore.generation.lengths import check_lengths
from nemo_rl_mcore.generation.refit.verification import of_all
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.engine_requests import EngineRequests
from nemo_rl_mcore.workers.failures import WorkerError
from nemo_rl_mcore.workers.started_engines import WeightSource, start_engines
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup

Answer = TypeVar("Answer")

_HEALTH_S = 10.0


class EngineGeneration:
    """Implements `interfaces.GenerationInterface` over engines that hold a copy of a policy's weights.

    Engines start when they are first given weights. One that dies ends the run with a WorkerError, unless one of the
    kind's restarts is left: then all start anew, get the weights, and are asked again. The noise of a row does not
    depend on who answers it, nor on when.

    Args:
        kind: what the engines are.
        config: the policy section.
        cluster: the session that places the engines.
        source: where the weights come from.
        stop_ids: token ids that end a response and belong to it.
        seed: of the noise.
        starting: entered around each start of the engines.
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
        self._kind, self._config, self._cluster, self._source = kind, config, cluster, source
        self._stop_ids, self._seed = tuple(stop_ids), seed
        self._group: RayWorkerGroup | None = None
        self._requests: EngineRequests | None = None
        self._held: int | None = None
        self._version: int | None = None
        self.weights_digest = ""
        """Of the weights that the engines hold, where refits are verified; see `refit.verification.of_all`."""
        self._asleep = False
        self._restarts_left = kind.max_restarts
        self._starting, self._check = starting, check

    def update_weights(self, version: int) -> None:
        """See `interfaces.GenerationInterface.update_weights`."""
        self._version = version
        self._with_engines(lambda engines: None)
        if self._check is not None:
            self._check(self)
            self._check = None

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`.

        Besides, weight_versions int64 [B, T]: of the weights that drew each token, -1 behind the end.
        """
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        keys = sample_keys(self._seed, step, data["prompt_index"], data["sample_index"])
        asked = BatchedDataDict(input_ids=data["input_ids"], input_lengths=data["input_lengths"], seeds=keys)
        sampling = Sampling.of(self._config.generation, self._stop_ids, greedy=greedy)

        def ask(engines: RayWorkerGroup) -> list[list[Response]]:
            shards = [{"requests": as_requests(shard)} for shard in asked.split(engines.world_size)]
            return engines.run_all(
                "generate",
                per_rank_kwargs=shards,
                sampling=sampling,
                version=self._held,
                context=f"step {step}",
            )

        responses = [response for answers in self._with_engines(ask) for response in answers]
        return as_batch(responses, sampling.max_new_tokens)

    def next_logprobs(
        self, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[Sequence[NextLogprobs]]:
        """Of each engine; see `Engine.next_logprobs`."""
        return self._with_engines(
            lambda engines: engines.run_all("next_logprobs", prompts=prompts, temperature=temperature)
        )

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        """See `interfaces.RolloutEngines.respond`; raises EngineFailedError."""
        assert self._requests is not None  # the engines have been given weights
        sampling = Sampling.of(self._config.generation, self._stop_ids, greedy=False)
        responses = await self._requests.respond(as_requests(self._keyed(data, step)), sampling, ticket)
        return as_batch(responses, sampling.max_new_tokens)

    def whereabouts(self, ticket: str) -> str:
        """See `interfaces.RolloutEngines.whereabouts`."""
        return self._requests.whereabouts(ticket) if self._requests is not None else ""

    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`: engines that share the ranks' GPUs give their memory back."""
        if self._group is not None and self._kind.sleeps and not self._asleep:
            self._group.run_all("sleep")
            self._asleep, self._held = True, None

    def shutdown(self) -> None:
        """End the engines; idempotent."""
        if self._group is not None:
            self._group.shutdown()
        self._group = self._requests = self._held = None
        self._asleep = False

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _keyed(self, data: BatchedDataDict, step: int) -> BatchedDataDict:
        """The prompts with the key of each row's noise."""
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        keys = sample_keys(self._seed, step, data["prompt_index"], data["sample_index"])
        return BatchedDataDict(input_ids=data["input_ids"], input_lengths=data["input_lengths"], seeds=keys)

    def _with_engines(self, ask: Callable[[RayWorkerGroup], Answer]) -> Answer:
        """Ask engines that hold the current weights; if one is lost, all start anew as often as the config allows."""
        while True:
            try:
                return ask(self._ready())
            except WorkerError as error:
                lost = self._loss_of_an_engine(error)
                if lost is None:
                    raise
                if not self._restarts_left:
                    raise lost from None
                self._restarts_left -= 1
                write_line(
                    sys.stderr,
                    f"{self._kind.noun}s start anew, {self._restarts_left} restarts left "
                    f"({self._kind.section}.max_restarts): {str(lost).splitlines()[0]}",
                )
                self.shutdown()

    def _loss_of_an_engine(self, error: WorkerError) -> WorkerError | None:
        """The failure that says so if an engine is gone; the error may be of ranks that were sending to it."""
        if self._group is None:
            return None
        if error.group == self._kind.name and not error.usable:
            return error
        try:
            self._group.run_all(
                "health", context=f"after a failure of {error.method}", timeout_s=_HEALTH_S, key=""
            )
        except WorkerError as lost:
            return lost
        return None

    def _ready(self) -> RayWorkerGroup:
        if self._version is None:
            raise WrongWeightsError("the engines have not been given weights: call update_weights first")
        if self._group is None:
            with self._starting():
                self._group = start_engines(self._kind, self._config, self._cluster, self._source)
            self._requests = EngineRequests(self._group, self._kind, self._cluster.lost)
        if self._held != self._version:
            self._refit(self._group, self._version)
        return self._group

    def _refit(self, engines: RayWorkerGroup, version: int) -> None:
        context = f"weights of version {version}"
        self._held = None
        if self._asleep:
            engines.run_all("wake_up", ["weights"], context=context)
        engines.run_all("begin_refit", version, context=context)
        sent = self._source.send_weights()
        acknowledged = engines.run_all("finish_refit", version, sent, context=context)
        assert acknowledged == [version] * engines.world_size
        if self._asleep:
            engines.run_all("wake_up", ["kv_cache"], context=context)
            self._asleep = False
        self._held, self.weights_digest = version, of_all(sent)
