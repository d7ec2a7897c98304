"""The driver's handle of engines of any kind: starts them, sends them weights, asks them, and starts them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.validation import BatchCheck
from nemo_rl_mcore.generation.engine import (
    EngineKind,
    Response,
    Sampling,
    WrongWeightsError,
    as_batch,
    as_requests,
)
from nemo_rl_mcore.generation.lengths import check_lengths
from nemo_rl_mcore.generation.refit.sender import BroadcastRendezvous, Engines, RefitSettings
from nemo_rl_mcore.generation.refit.verification import Digests
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.workers.cluster import Placement, RayCluster
from nemo_rl_mcore.workers.engine_placement import place_engines, transport_of
from nemo_rl_mcore.workers.failures import WorkerError
from nemo_rl_mcore.workers.ray_engines import RayEngines
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup

Answer = TypeVar("Answer")

_HEALTH_S = 10.0
_LARGEST_SEED = (1 << 63) - 1
"""Engines seed torch's generators, and may take -1 for no seed: keys lose their sign."""


class WeightSource(Protocol):
    """Who has the weights; `workers.policy.Policy` does."""

    @property
    def placement(self) -> Placement:
        """Where its ranks run."""
        ...

    def gpus(self) -> Sequence[str]:
        """The GPU of each rank; empty on CPU."""
        ...

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        """Get ready to send to these engines, and to no others any more; says where to meet for a broadcast."""
        ...

    def send_weights(self) -> Digests:
        """Stream all weights to the engines; returns the tensors by name, with digests where they are verified."""
        ...


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
    ) -> None:
        self._kind, self._config, self._cluster, self._source = kind, config, cluster, source
        self._stop_ids, self._seed = tuple(stop_ids), seed
        self._group: RayWorkerGroup | None = None
        self._held: int | None = None
        self._version: int | None = None
        self._asleep = False
        self._restarts_left = kind.max_restarts

    def update_weights(self, version: int) -> None:
        """See `interfaces.GenerationInterface.update_weights`."""
        self._version = version
        self._with_engines(lambda engines: None)

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`.

        Besides, weight_versions int64 [B, T]: of the weights that drew each token, -1 behind the end.
        """
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        keys = sample_keys(self._seed, step, data["prompt_index"], data["sample_index"])
        asked = BatchedDataDict(
            input_ids=data["input_ids"], input_lengths=data["input_lengths"], seeds=keys & _LARGEST_SEED
        )
        sampling = self._sampling(greedy)

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

    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`: engines that share the ranks' GPUs give their memory back."""
        if self._group is not None and self._kind.sleeps and not self._asleep:
            self._group.run_all("sleep")
            self._asleep, self._held = True, None

    def shutdown(self) -> None:
        """End the engines; idempotent."""
        if self._group is not None:
            self._group.shutdown()
        self._group = self._held = None
        self._asleep = False

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

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
            self._group = self._start()
        if self._held != self._version:
            self._refit(self._group, self._version)
        return self._group

    def _start(self) -> RayWorkerGroup:
        kind, colocated = self._kind, self._config.generation.colocated
        engines = RayWorkerGroup(
            kind.engine,
            self._cluster,
            (kind.settings,),
            start_timeout_s=kind.start_timeout_s,
            call_timeout_s=kind.call_timeout_s,
            deadline_keys=kind.section,
            placement=place_engines(
                self._cluster, kind, colocated, self._source.placement, self._source.gpus()
            ),
            name=kind.name,
            noun="engine",
        )
        try:
            self._connect(engines)
        except BaseException:
            engines.shutdown()
            raise
        return engines

    def _connect(self, engines: RayWorkerGroup) -> None:
        """Tell the ranks which engines to send to."""
        kind = self._kind
        settings = RefitSettings(
            transport_of(self._cluster.config, self._config.generation),
            kind.bucket_bytes,
            kind.call_timeout_s,
            receivers=engines.world_size * kind.gpus,
            verify=self._config.generation.verify_refit,
            held_as=kind.precision,
        )
        reached = RayEngines(engines.actors, kind.noun, f"{kind.section}.call_timeout_s")
        rendezvous = self._source.connect_engines(reached, settings)
        if rendezvous is not None:
            engines.run_all(
                "join_broadcast",
                per_rank_kwargs=[
                    {"first_rank": 1 + engine * kind.gpus} for engine in range(engines.world_size)
                ],
                address=rendezvous.address,
                port=rendezvous.port,
                world_size=rendezvous.world_size,
                timeout_s=settings.timeout_s,
            )

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
        self._held = version

    def _sampling(self, greedy: bool) -> Sampling:
        generation = self._config.generation
        return Sampling(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            stop_ids=self._stop_ids,
            stop_strings=generation.stop_strings or (),
            greedy=greedy,
        )
