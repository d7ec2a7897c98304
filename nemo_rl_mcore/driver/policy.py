"""The driver's handle for a policy: takes whole batches, sends each rank its shard, and returns whole batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from nemo_rl_mcore.config import PolicyConfig, Role, RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.microbatch import split_balanced
from nemo_rl_mcore.data.validation import BatchCheck, check_lengths
from nemo_rl_mcore.driver.actors.failures import WorkerError
from nemo_rl_mcore.driver.actors.one_process import InProcessRank, OneProcess
from nemo_rl_mcore.driver.actors.places import HUB_TOKENS, Placement
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.rank.refit.digests import Digests
from nemo_rl_mcore.rank.refit.sender import BroadcastRendezvous, Engines, RefitSettings
from nemo_rl_mcore.rank.train_step import BatchSizes, Phase, out_of_order
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.recipe.rules.policies import checked_policy

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.cluster import RayCluster
    from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup

    type WorkerGroup = RayWorkerGroup | InProcessRank

_ANSWERS_S = 10.0
_NOBODY: Collection[int] = ()
_FIRST: Collection[int] = (0,)


class Policy(AbstractContextManager["Policy"]):
    """A policy, or a critic, over a group of `MegatronPolicyWorker`s; a context manager.

    B rows, S sequence length. trained_only: True to compute only tokens marked by token_mask [B, S]; others are 0.
    trained, temperature, verify_checksums: see `MegatronPolicyWorker`. name: the model's name in errors, such as
    "teacher". colocated_with: another policy on the same machines and GPUs. group: builds the ranks from
    `RayWorkerGroup`'s arguments; in a session, this class is the default. workers: the group.

    Raises WorkerError, naming the rank, when a rank fails or dies. A batch invalid for the model or the loss raises a
    ValueError with key and row before anything is sent.
    """

    def __init__(
        self,
        config: PolicyConfig,
        cluster: RayCluster | OneProcess,
        *,
        seed: int,
        init_reference_model: bool = False,
        role: Role = Role.POLICY,
        trained: bool = True,
        colocated_with: Policy | None = None,
        temperature: float | None = None,
        verify_checksums: bool = True,
        name: str = "policy",
        group: Callable[..., WorkerGroup] | None = None,
    ) -> None:
        self._config = checked_policy(config, only_read=not trained)
        # Ranks can restart, or run next to another model, only in a session.
        self._cluster, self._colocated_with = cast("RayCluster", cluster), colocated_with
        self._check = BatchCheck.of(config)
        if group is None and isinstance(cluster, OneProcess):
            group = InProcessRank
        elif group is None:
            from nemo_rl_mcore.driver.actors.gang import RayWorkerGroup  # brings in Ray

            group = RayWorkerGroup
        self._start_workers = partial(
            group,
            MegatronPolicyWorker,
            cluster,
            (config,),
            {
                "seed": seed,
                "init_reference_model": init_reference_model,
                "role": role,
                "trained": trained,
                "temperature": temperature,
                "verify_checksums": verify_checksums,
            },
            call_timeout_s=config.call_timeout_s,
            deadline_keys="policy",
            name=name,
            # Not in a rank's environment, since Ray logs it.
            secrets={
                name: os.environ[name] for name in HUB_TOKENS if name in os.environ and config.model_name
            },
        )
        self.incarnation = 0
        self._start()

    def _start(self, kept: Placement | None = None) -> None:
        if kept is None and (beside := self._colocated_with) is not None:
            kept = self._cluster.place_colocated(beside.placement, beside.gpus())
        self.workers = self._start_workers(placement=kept)
        self.placement = self.workers.placement
        # Rank -> data-parallel rank. Ranks with the same value share one model copy and get the same rows.
        context = "start of the workers"
        self._shard_of_rank: list[int] = self.workers.run_all("data_parallel_rank", context=context)
        self._shards = max(self._shard_of_rank) + 1
        self._first_of_shard = [self._shard_of_rank.index(shard) for shard in range(self._shards)]
        self.updates = 0
        """Completed optimizer steps, including skipped ones, since the start or the last `load_checkpoint`."""
        self._calls: dict[str, int] = {}
        self._open_loss: LossFunction | None = None  # the loss of the last begun step

    def restart(self) -> None:
        """Replace all ranks by new ones with the run's initial weights; engines reconnect.

        If all machines are alive, the new ranks keep their places, as do engines that share them. Otherwise wait for
        machines (`RayCluster.await_machines`); a colocated model moves with its partner.
        """
        nodes = {identity.node_id for identity in self.workers.identities.values()}
        kept = self.placement if not self._cluster.lost_nodes(nodes) else None
        self.workers.shutdown(keep_places=kept is not None)
        if kept is None and self._colocated_with is None:
            self._cluster.await_machines()
        self.incarnation += 1
        self._start(kept)

    def serves(self) -> bool:
        """Return True if all ranks answer within a few seconds."""
        try:
            self.workers.run_all(
                "data_parallel_rank", context="after a failure", timeout_s=_ANSWERS_S, key=""
            )
        except WorkerError as error:
            return error.usable
        return True

    def get_logprobs(self, data: BatchedDataDict, *, trained_only: bool = False) -> BatchedDataDict:
        """Return {"logprobs": fp32 [B, S]}, where column i is token i's log-probability."""
        self._check.reading(data, trained_only=trained_only)
        return self._map("get_logprobs", data, trained_only=trained_only)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return {"reference_logprobs": fp32 [B, S]}, computed with the run's initial weights."""
        self._check.reading(data, trained_only=trained_only)
        return self._map("get_reference_policy_logprobs", data, trained_only=trained_only)

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return the k most probable next tokens at each position; the keys are those of `MegatronPolicyWorker`."""
        self._check.reading(data, k=k, trained_only=trained_only)
        return self._map("get_topk_logits", data, k=k, trained_only=trained_only)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Return {"values": fp32 [B, S]}, where column i is the value of the state before token i."""
        self._check.reading(data)
        return self._map("get_values", data)

    def generate(
        self, data: BatchedDataDict, *, step: int, stop_ids: Sequence[int], greedy: bool
    ) -> BatchedDataDict:
        """Answer prompts; see `GenerationInterface.generate`."""
        self._check.prompts(data)
        check_lengths(data["input_lengths"], self._config)
        return self._map("generate", data, step=step, stop_ids=list(stop_ids), greedy=greedy)

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take optimizer steps over the batch; the keys are those of `MegatronPolicyWorker.finish_train_step`.

        gbs, mbs: rows per optimizer step and per microbatch, in whole samples of the loss; None for the config's, which
        counts samples. With `eval_mode` nothing is updated, and all rows form one batch regardless of gbs.
        """
        self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample, eval_mode=eval_mode)
        sizes = BatchSizes.of(self._config, loss_fn, gbs, mbs)
        if not eval_mode:
            sizes.of_shard(self._shards)
        split = [self._split(step, loss_fn) for step in ([data] if eval_mode else sizes.steps(data))]
        shards = [BatchedDataDict.from_batches(steps) for steps in zip(*split, strict=True)]
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": sizes.gbs, "mbs": sizes.mbs}
        result = self._update("train", loss_fn, shards, **options)
        self.updates += 0 if eval_mode else len(result["skip_reasons"])
        return result

    def begin_train_step(
        self,
        loss_fn: LossFunction,
        gbs: int | None = None,
        mbs: int | None = None,
        step_id: str | None = None,
    ) -> None:
        """Open one optimizer step for chunks; refuse an already committed `step_id`.

        gbs, mbs: see `train`; the scheduler advances by the samples of `gbs` rows, whatever the chunks hold.
        """
        sizes = BatchSizes.of(self._config, loss_fn, gbs, mbs)
        options = {"loss_fn": loss_fn, "gbs": sizes.gbs, "mbs": sizes.mbs, "step_id": step_id}
        self._call("begin_train_step", _NOBODY, **options)
        self._open_loss = loss_fn

    def train_microbatch(self, data: BatchedDataDict, *, chunk_id: str | None = None) -> None:
        """Add a chunk of any number of whole samples to the open step; refuse an already added `chunk_id`."""
        if self._open_loss is None:
            raise out_of_order("train_microbatch", Phase.IDLE)
        loss_fn = self._open_loss
        self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample)
        self._call("train_microbatch", _NOBODY, self._split(data, loss_fn), chunk_id=chunk_id)

    def finish_train_step(self) -> dict[str, Any]:
        """Update the weights by the mean over all chunks' tokens (or sequences); the keys are those of `train`."""
        result = self._update("finish_train_step", self._open_loss)
        self.updates += 1
        return result

    def abort_train_step(self) -> None:
        """Drop the open or failed step without a trace; do nothing if none is open."""
        self._call("abort_train_step", _NOBODY)

    def save_checkpoint(self, folder: str, *, wait: bool = True) -> None:
        """Write the training state to a folder visible to all ranks; without `wait`, write a copy in the background.

        `checkpoint_written` reports the end; the next save waits for it.
        """
        self._call("save_checkpoint", _NOBODY, folder=str(Path(folder).absolute()), wait=wait)

    def checkpoint_written(self, *, wait: bool = True) -> float | None:
        """Return the seconds that writing the last copy took, None while in progress; with `wait`, wait for it.

        Raises the error that writing raised.
        """
        taken: list[float | None] = self._call("checkpoint_written", wait=wait)
        return None if None in taken else max(cast("list[float]", taken))

    def load_checkpoint(self, folder: str, *, weights_only: bool = False) -> None:
        """Restore everything that `save_checkpoint` wrote; with `weights_only`, keep moments and schedule unchanged.

        The parallel layout may differ. Raises if the folder does not hold a checkpoint of this model.
        """
        self._call("load_checkpoint", _NOBODY, folder=str(Path(folder).absolute()), weights_only=weights_only)
        self.updates = 0

    def has_unknown_update(self) -> bool:
        """Return True if a rank took an optimizer step whose result was lost because a rank raised."""
        return any(taken != self.updates for taken in self._call("updates"))

    def loading_s(self) -> float:
        """Return the seconds that loading weights has taken, on the slowest rank."""
        return max(self._call("loading_s"))

    def gpus(self) -> Sequence[str]:
        return [gpu for gpu in self._call("gpu") if gpu]

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        return self._call("connect_engines", _FIRST, engines=engines, settings=settings)[0]

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every tensor sent in a refit, by Hugging Face name."""
        return self._call("prepare_refit_info", _FIRST)[0]

    def weights_digest(self, held_as: str | None = None) -> str:
        """Return the digest of all weights as sent in a refit; see `refit.digests.of_all`."""
        return self._call("weights_digest", _FIRST, held_as=held_as)[0]

    def prepare_for_training(self) -> None:
        self._call("prepare_for_training", _NOBODY)

    def finish_training(self) -> None:
        """Do nothing, as in NeMo RL: with policy.offload the next call frees unneeded device memory."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self._call("prepare_for_lp_inference", _NOBODY, keep_train_buffers=keep_train_buffers)

    def send_weights(self) -> Digests:
        """Stream all weights to the engines; return the tensors by name, with digests if they are verified."""
        return self._call("send_weights", _FIRST)[0]

    def export_hf(self, folder: str, *, origin: str | None = None, adapters: bool = False) -> None:
        """Write the weights, or only adapters, as a Hugging Face folder visible to the first rank's machine."""
        self._call("export_hf", _NOBODY, folder=folder, origin=origin, adapters=adapters)

    def shutdown(self) -> None:
        self.workers.shutdown()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _map(self, method: str, data: BatchedDataDict, **kwargs: Any) -> BatchedDataDict:
        """Call a row-wise method; copies of the last row pad the batch to a multiple of the shards."""
        data = data.without(EPISODE)  # row-wise results do not depend on the episode
        size = data.size
        if missing := -size % self._shards:
            data = data.select_indices([*range(size), *[size - 1] * missing])
        shards = data.shard_by_batch_size(self._shards)
        answers = self._call(method, self._first_of_shard, shards, **kwargs)
        answered = BatchedDataDict.from_batches([answers[rank] for rank in self._first_of_shard])
        return answered.slice(0, size)

    def _split(self, data: BatchedDataDict, loss_fn: LossFunction) -> list[BatchedDataDict]:
        if self._config.token_budgets is None:
            return data.split(self._shards, loss_fn.rows_per_sample)
        # Sums do not depend on the distribution, and ranks with equal numbers of tokens wait less for each other.
        return split_balanced(data, self._shards, loss_fn.rows_per_sample)

    def _update(
        self,
        method: str,
        loss: LossFunction | None,
        shards: Sequence[BatchedDataDict] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Call a method that ends optimizer steps: totals are equal on all ranks, tables have each shard's rows."""
        has_table = loss is not None and loss.gives_row_table
        ranks = self._first_of_shard if has_table else _FIRST
        answers = self._call(method, ranks, shards, **kwargs)
        results = [answers[rank] for rank in ranks]
        tables = [result["row_table"] for result in results if "row_table" in result]
        if len(tables) <= 1:
            return results[0]
        return results[0] | {"row_table": torch.cat(tables)}

    def _call(
        self,
        method: str,
        answering: Collection[int] | None = None,
        shards: Sequence[BatchedDataDict] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method on every rank with its shard; answering: the ranks whose results are read, None for all."""
        self._calls[method] = self._calls.get(method, 0) + 1
        if shards is not None:
            # A shard's ranks share one object; a shard with a single rank is sent with the call.
            alone = len(self._shard_of_rank) == len(shards)
            given = shards if alone else [self.workers.share(shard) for shard in shards]
            kwargs["per_rank_kwargs"] = [{"data": given[shard]} for shard in self._shard_of_rank]
        context = f"call {self._calls[method]}"
        return self.workers.run_all(method, answering=answering, context=context, **kwargs)


def open_place(config: RunConfig, *, engines: bool = False) -> OneProcess | RayCluster:
    """Return the place for the ranks: this process for a single rank, else a session.

    engines: True for other processes beside the ranks, which require a session, as does RAY_ADDRESS.
    """
    if config.cluster.world_size == 1 and not engines and not os.environ.get("RAY_ADDRESS"):
        return OneProcess(config.cluster)
    from nemo_rl_mcore.driver.actors.cluster import RayCluster  # brings in Ray

    return RayCluster(config.cluster)


def start_frozen(config: RunConfig, cluster: OneProcess | RayCluster) -> Policy:
    temperature = config.logprob_temperature
    return Policy(config.policy, cluster, seed=config.seed, temperature=temperature, trained=False)


@dataclass(frozen=True)
class EmbeddedGeneration(GenerationInterface):
    """Generation on the training model, whose weights and memory it shares, with nothing to update or offload.

    The decode loop is in `rank.megatron.generation`. stop_ids: token ids that end a response and belong to it.
    """

    policy: Policy
    stop_ids: tuple[int, ...]

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        return self.policy.generate(data, step=step, stop_ids=self.stop_ids, greedy=greedy)
