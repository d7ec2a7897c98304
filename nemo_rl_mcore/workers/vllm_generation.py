"""The driver's handle of the vLLM engines: starts them, sends them weights, asks them, and starts them again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.hf_config import hf_config_of
from nemo_rl_mcore.config.vllm import cpu_cache_bytes, refit_bucket_bytes
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.data.validation import BatchCheck
from nemo_rl_mcore.generation.lengths import check_lengths
from nemo_rl_mcore.generation.vllm.engine import EngineSettings, Sampling, WrongWeightsError
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.workers.cluster import Placement, RayCluster
from nemo_rl_mcore.workers.engine_placement import place_engines, transport_of
from nemo_rl_mcore.workers.failures import WorkerError
from nemo_rl_mcore.workers.vllm_worker import AsyncVllmWorker, VllmWorker
from nemo_rl_mcore.workers.weight_sync import BroadcastMeeting, RefitSettings
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup

Answer = TypeVar("Answer")

_PING_S = 10.0
_LARGEST_SEED = (1 << 63) - 1
"""vLLM seeds torch's generators, and takes -1 for no seed: keys lose their sign."""


class WeightSource(Protocol):
    """Who has the weights; `workers.policy.Policy` does."""

    @property
    def placement(self) -> Placement:
        """Where its ranks run."""
        ...

    def gpus(self) -> Sequence[str]:
        """The GPU of each rank; empty on CPU."""
        ...

    def connect_engines(self, engines: Sequence[Any], settings: RefitSettings) -> BroadcastMeeting | None:
        """Get ready to send to these actors, and to no others any more; says where to meet for a broadcast."""
        ...

    def send_weights(self) -> int:
        """Stream all weights to the engines; returns the number of tensors."""
        ...


class VllmGeneration:
    """Implements `interfaces.GenerationInterface` over engines that hold a copy of a policy's weights.

    Engines start when they are first given weights. One that dies ends the run with a WorkerError, unless
    policy.generation.vllm_cfg.max_restarts is left: then all start anew, get the weights, and are asked again. The
    noise of a row does not depend on who answers it, nor on when.

    Args:
        config: the policy section.
        cluster: the session that places the engines.
        source: where the weights come from.
        folder: of the run; `vllm_model/` is written into it, which the engines start from.
        stop_ids: token ids that end a response and belong to it.
        seed: of the noise.

    """

    def __init__(
        self,
        config: PolicyConfig,
        cluster: RayCluster,
        source: WeightSource,
        *,
        folder: Path,
        stop_ids: Sequence[int],
        seed: int,
    ) -> None:
        self._config, self._cluster, self._source = config, cluster, source
        self._stop_ids, self._seed = tuple(stop_ids), seed
        on_cpu = cluster.config.on_cpu
        self._settings = engine_settings(config, _write_model_folder(config, folder), on_cpu=on_cpu)
        self._group: RayWorkerGroup | None = None
        self._held: int | None = None
        self._version: int | None = None
        self._asleep = False
        self._restarts_left = config.generation.vllm_cfg.max_restarts

    def update_weights(self, version: int) -> None:
        """See `interfaces.GenerationInterface.update_weights`."""
        self._version = version
        self._with_engines(lambda engines: None)

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`.

        Besides, min_weight_version and max_weight_version int64 [B]: the versions that drew a row's tokens.
        """
        BatchCheck.of(self._config).prompts(data)
        check_lengths(data["input_lengths"], self._config)
        keys = sample_keys(self._seed, step, data["prompt_index"], data["sample_index"])
        asked = BatchedDataDict(
            input_ids=data["input_ids"], input_lengths=data["input_lengths"], seeds=keys & _LARGEST_SEED
        )
        sampling = self._sampling(greedy)

        def ask(engines: RayWorkerGroup) -> list[BatchedDataDict]:
            shards = [{"data": shard} for shard in asked.deal(engines.world_size)]
            return engines.run_each(
                "generate",
                per_rank_kwargs=shards,
                sampling=sampling,
                version=self._held,
                context=f"step {step}",
            )

        return BatchedDataDict.from_batches(self._with_engines(ask))

    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`: engines that share the ranks' GPUs give their memory back."""
        if self._group is not None and self._settings.enable_sleep_mode and not self._asleep:
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
                sys.stderr.write(
                    f"vLLM engines start anew, {self._restarts_left} restarts left "
                    f"(policy.generation.vllm_cfg.max_restarts): {str(lost).splitlines()[0]}\n"
                )
                self.shutdown()

    def _loss_of_an_engine(self, error: WorkerError) -> WorkerError | None:
        """The failure that says so if an engine is gone; the error may be of ranks that were sending to it."""
        if self._group is None:
            return None
        if self._group.failure is not None:
            return self._group.failure
        try:
            self._group.run_all("ping", context=f"after a failure of {error.method}", timeout_s=_PING_S)
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
        vllm = self._config.generation.vllm_cfg
        placement = place_engines(
            self._cluster, self._config.generation, self._source.placement, self._source.gpus()
        )
        engines = RayWorkerGroup(
            AsyncVllmWorker if vllm.async_engine else VllmWorker,
            self._cluster,
            (self._settings,),
            start_timeout_s=vllm.start_timeout_s,
            call_timeout_s=vllm.call_timeout_s,
            placement=placement,
            noun="vLLM engine",
        )
        try:
            if vllm.async_engine:
                engines.run_all("start", timeout_s=vllm.start_timeout_s)
            self._connect(engines)
        except BaseException:
            engines.shutdown()
            raise
        return engines

    def _connect(self, engines: RayWorkerGroup) -> None:
        """Tell the ranks which engines to send to."""
        generation = self._config.generation
        size = generation.vllm_cfg.tensor_parallel_size
        settings = RefitSettings(
            transport_of(self._cluster.config, generation),
            refit_bucket_bytes(self._config),
            generation.vllm_cfg.call_timeout_s,
            receivers=engines.world_size * size,
        )
        meeting = self._source.connect_engines(engines.actors, settings)
        if meeting is not None:
            engines.run_each(
                "join_refit_broadcast",
                per_rank_kwargs=[{"first_rank": 1 + engine * size} for engine in range(engines.world_size)],
                address=meeting.address,
                port=meeting.port,
                world_size=meeting.world_size,
                timeout_s=settings.timeout_s,
            )

    def _refit(self, engines: RayWorkerGroup, version: int) -> None:
        context = f"weights of version {version}"
        self._held = None
        if self._asleep:
            engines.run_all("wake_up", ["weights"], context=context)
        engines.run_all("begin_refit", version, context=context)
        tensors = self._source.send_weights()
        acknowledged = engines.run_all("finish_refit", version, tensors, context=context)
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


def engine_settings(config: PolicyConfig, model_folder: Path, *, on_cpu: bool) -> EngineSettings:
    """How vLLM is to run this policy."""
    vllm = config.generation.vllm_cfg
    return EngineSettings(
        model_dir=str(model_folder),
        precision=vllm.precision or config.precision,
        max_model_len=vllm.max_model_len or config.max_total_sequence_length,
        max_num_seqs=vllm.max_num_seqs,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        kv_cache_memory_bytes=cpu_cache_bytes(config) if on_cpu else vllm.kv_cache_memory_bytes,
        enforce_eager=vllm.enforce_eager or on_cpu,
        enable_sleep_mode=config.generation.colocated.enabled and not on_cpu,
        tokenizer=_tokenizer_folder(config, model_folder) if config.generation.stop_strings else None,
    )


def _write_model_folder(config: PolicyConfig, folder: Path) -> Path:
    """The folder that engines start from: the architecture alone, since weights are sent."""
    folder = folder.absolute() / "vllm_model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(hf_config_of(config.model, dtype=config.precision), indent=2)
    )
    return folder


def _tokenizer_folder(config: PolicyConfig, folder: Path) -> str:
    """The tokenizer of the run as a Hugging Face folder."""
    load_tokenizer(config.tokenizer.name).save_as_hugging_face(folder)
    return str(folder)
