"""The driver's handle of a policy: whole batches go in, each rank gets its shard, whole batches come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.token_budget import balanced_order
from nemo_rl_mcore.interfaces import Role
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.workers.cluster import Placement, RayCluster, free_port
from nemo_rl_mcore.workers.policy_worker import MegatronPolicyWorker
from nemo_rl_mcore.workers.ray_engines import RayEngines
from nemo_rl_mcore.workers.weight_sync import BroadcastMeeting, RefitSettings
from nemo_rl_mcore.workers.worker_group import RayWorkerGroup


class Policy:
    """`PolicyInterface`, or `ValueInterface` in that role, over a group of `MegatronPolicyWorker`s; a context manager.

    beside: another one, whose machines and GPUs this one shares.

    Raises WorkerError, naming the rank, when a rank fails or dies.
    """

    def __init__(
        self,
        config: PolicyConfig,
        cluster: RayCluster,
        *,
        seed: int,
        init_reference_model: bool = False,
        role: Role = Role.POLICY,
        beside: Policy | None = None,
    ) -> None:
        if config.init_checkpoint is not None:
            # The ranks may run in another folder than the driver.
            absolute = str(Path(config.init_checkpoint).absolute())
            config = config.model_copy(update={"init_checkpoint": absolute})
        self._config = config
        self._workers = RayWorkerGroup(
            MegatronPolicyWorker,
            cluster,
            (config,),
            {"seed": seed, "init_reference_model": init_reference_model, "role": role},
            placement=None if beside is None else cluster.place_beside(beside.placement, beside.gpus()),
        )
        # Rank -> data-parallel rank. Ranks with an equal one hold parts of one model copy and get the same rows.
        self._shard_of_rank: list[int] = self._workers.run_all(
            "data_parallel_rank", context="start of the workers"
        )
        self._shards = max(self._shard_of_rank) + 1
        self._calls: dict[str, int] = {}
        self._rows_per_sample = 1  # of the open step's loss

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """See `interfaces.PolicyInterface.get_logprobs`."""
        return self._map("get_logprobs", data)

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """See `interfaces.PolicyInterface.get_reference_policy_logprobs`."""
        return self._map("get_reference_policy_logprobs", data)

    def get_topk_logits(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `interfaces.PolicyInterface.get_topk_logits`."""
        return self._map("get_topk_logits", data, k=k)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """See `interfaces.ValueInterface.get_values`; for the role value."""
        return self._map("get_values", data)

    def generate(
        self, data: BatchedDataDict, *, step: int, stop_ids: Sequence[int], greedy: bool
    ) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`."""
        return self._map("generate", data, step=step, stop_ids=list(stop_ids), greedy=greedy)

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """See `interfaces.TrainedModel.train`; the totals are equal on every rank."""
        step = gbs or self._config.train_global_batch_size
        if self._config.token_budgets is not None and data.size % step == 0:
            # Sums do not depend on who adds what, and ranks with equally many tokens wait less for each other.
            data = BatchedDataDict.from_batches(
                [self._balanced(data.slice(first, first + step)) for first in range(0, data.size, step)]
            )
        shards = data.shard_by_batch_size(self._shards, step)
        return self._run("train", shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=step, mbs=mbs)[0]

    def _balanced(self, batch: BatchedDataDict) -> BatchedDataDict:
        return batch.select_indices(balanced_order(batch["input_lengths"].tolist(), self._shards))

    def begin_train_step(self, loss_fn: LossFunction, *, step_id: str | None = None) -> None:
        """See `interfaces.PolicyInterface.begin_train_step`."""
        self._run_all("begin_train_step", loss_fn=loss_fn, step_id=step_id)
        self._rows_per_sample = loss_fn.rows_per_sample

    def train_microbatch(self, data: BatchedDataDict, *, chunk_id: str | None = None) -> None:
        """See `interfaces.PolicyInterface.train_microbatch`."""
        self._run("train_microbatch", data.deal(self._shards, self._rows_per_sample), chunk_id=chunk_id)

    def finish_train_step(self) -> dict[str, Any]:
        """See `interfaces.PolicyInterface.finish_train_step`; the totals are equal on every rank."""
        return self._run_all("finish_train_step")[0]

    def abort_train_step(self) -> None:
        """See `interfaces.PolicyInterface.abort_train_step`."""
        self._run_all("abort_train_step")

    def save_checkpoint(self, folder: str) -> None:
        """See `interfaces.PolicyInterface.save_checkpoint`."""
        self._run_all("save_checkpoint", folder=str(Path(folder).absolute()))

    def load_checkpoint(self, folder: str, *, weights_only: bool = False) -> None:
        """See `interfaces.PolicyInterface.load_checkpoint`."""
        self._run_all("load_checkpoint", folder=str(Path(folder).absolute()), weights_only=weights_only)

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return self._workers.placement

    def gpus(self) -> Sequence[str]:
        """The GPU of each rank; empty on CPU."""
        found: list[str] = self._run_all("gpu")
        return [gpu for gpu in found if gpu]

    def connect_engines(self, engines: Sequence[Any], settings: RefitSettings) -> BroadcastMeeting | None:
        """Get ready to send weights to these actors; says where to meet for a broadcast."""
        meeting = None
        if settings.transport == "nccl":
            host = self._workers.identities[0].host
            meeting = BroadcastMeeting(host, free_port(), 1 + settings.receivers)
        self._run_all("connect_engines", engines=RayEngines(engines), settings=settings, meeting=meeting)
        return meeting

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor that a refit sends, by its Hugging Face name."""
        return self._run_all("prepare_refit_info")[0]

    def send_weights(self) -> int:
        """Stream all weights to the engines; returns the number of tensors."""
        return self._run_all("send_weights")[0]

    def export_hf(self, folder: str, *, origin: str | None = None, timeout_s: float | None = None) -> None:
        """Write the weights as a Hugging Face folder, which the first rank's machine must see."""
        self._run_all("export_hf", folder=folder, origin=origin, timeout_s=timeout_s)

    def shutdown(self) -> None:
        """End every rank; idempotent."""
        self._workers.shutdown()

    def __enter__(self) -> Self:
        """Return the policy."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _map(self, method: str, data: BatchedDataDict, **kwargs: Any) -> BatchedDataDict:
        """Call a method that answers row by row. Rows that do not divide are made up with repeats of the last."""
        missing = -data.size % self._shards
        whole = data.select_indices([*range(data.size), *[data.size - 1] * missing]) if missing else data
        answers = self._run(method, whole.shard_by_batch_size(self._shards), **kwargs)
        first_of_shard = [self._shard_of_rank.index(shard) for shard in range(self._shards)]
        return BatchedDataDict.from_batches([answers[rank] for rank in first_of_shard]).slice(0, data.size)

    def _run(self, method: str, shards: Sequence[BatchedDataDict], **kwargs: Any) -> list[Any]:
        # One object for all the ranks of a shard.
        refs = [ray.put(shard) for shard in shards]
        per_rank: list[Mapping[str, Any]] = [{"data": refs[shard]} for shard in self._shard_of_rank]
        return self._workers.run_each(
            method, per_rank_kwargs=per_rank, context=self._next_call(method), **kwargs
        )

    def _run_all(self, method: str, **kwargs: Any) -> list[Any]:
        return self._workers.run_all(method, context=self._next_call(method), **kwargs)

    def _next_call(self, method: str) -> str:
        self._calls[method] = self._calls.get(method, 0) + 1
        return f"call {self._calls[method]}"
