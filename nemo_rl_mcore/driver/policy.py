"""The driver's handle of a policy: whole batches go in, each rank gets its shard, whole batches come back."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
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
from nemo_rl_mcore.driver.actors.places import Placement, hub_token
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
    """A model over a group of `MegatronPolicyWorker`s, a policy or in that role a critic; a context manager.

    B rows, S sequence length. trained_only: only of tokens that token_mask [B, S] marks; 0 elsewhere, where no loss
    reads.

    trained, temperature, verify_checksums: see `MegatronPolicyWorker`.
    name: what errors call it, such as "teacher".
    colocated_with: another one, whose machines and GPUs this one shares.
    group: what makes the ranks, from the arguments of `RayWorkerGroup`, which is the default for a session.

    Raises WorkerError, naming the rank, when a rank fails or dies. A batch that the model or the loss cannot take is a
    ValueError by key and row, and nothing of it is sent.
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
        # Only in a session may ranks start again, or beside another model.
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
            secrets=hub_token(os.environ) if config.model_name is not None else {},
        )
        self.incarnation = 0
        """How often its ranks were restarted."""
        self._start()

    def _start(self, kept: Placement | None = None) -> None:
        if kept is None and (beside := self._colocated_with) is not None:
            kept = self._cluster.place_colocated(beside.placement, beside.gpus())
        self._workers = self._start_workers(placement=kept)
        # Rank -> data-parallel rank. Ranks with an equal one hold parts of one model copy and get the same rows.
        context = "start of the workers"
        self._shard_of_rank: list[int] = self._workers.run_all("data_parallel_rank", context=context)
        self._shards = max(self._shard_of_rank) + 1
        self._first_of_shard = [self._shard_of_rank.index(shard) for shard in range(self._shards)]
        self.updates = 0
        """Optimizer steps, skipped ones too, whose results were given since the start or the last `load_checkpoint`."""
        self._calls: dict[str, int] = {}
        self._open_loss: LossFunction | None = None  # of the step that was begun last

    def restart(self) -> None:
        """Put new ranks in place of those there are, with the weights that the run began with; engines reconnect.

        Where their machines are all there they keep their places, and with them engines that share these. Else it waits
        for machines, see `RayCluster.await_machines`; one beside another model goes where that is.
        """
        nodes = {identity.node_id for identity in self._workers.identities.values()}
        kept = self._workers.placement if not self._cluster.lost_nodes(nodes) else None
        self._workers.shutdown(keep_places=kept is not None)
        if kept is None and self._colocated_with is None:
            self._cluster.await_machines()
        self.incarnation += 1
        self._start(kept)

    def serves(self) -> bool:
        """All ranks answer; one that hangs for some seconds does not."""
        context = "after a failure"
        try:
            self._workers.run_all("data_parallel_rank", context=context, timeout_s=_ANSWERS_S, key="")
        except WorkerError as error:
            return error.usable
        return True

    def get_logprobs(self, data: BatchedDataDict, *, trained_only: bool = False) -> BatchedDataDict:
        """Return {"logprobs": fp32 [B, S]}, column i about token i."""
        self._check.reading(data, trained_only=trained_only)
        return self._map("get_logprobs", data, trained_only=trained_only)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return {"reference_logprobs": fp32 [B, S]} of the weights at the start of the run."""
        self._check.reading(data, trained_only=trained_only)
        return self._map("get_reference_policy_logprobs", data, trained_only=trained_only)

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, *, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return the k most probable next tokens at each position; the keys are those of `MegatronPolicyWorker`."""
        self._check.reading(data, k=k, trained_only=trained_only)
        return self._map("get_topk_logits", data, k=k, trained_only=trained_only)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Return {"values": fp32 [B, S]}, column i of the state before token i."""
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

        gbs, mbs: rows of an optimizer step and of a microbatch, whole samples of the loss; None is the config's, which
        counts samples. Under `eval_mode` nothing is updated, and all rows are one batch, whatever gbs.

        The totals are equal on every rank.
        """
        self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample, eval_mode=eval_mode)
        sizes = BatchSizes.of(self._config, loss_fn, gbs, mbs)
        if not eval_mode:
            sizes.of_shard(self._shards)
        split = [self._split(step, loss_fn) for step in ([data] if eval_mode else sizes.steps(data))]
        shards = [BatchedDataDict.from_batches(steps) for steps in zip(*split, strict=True)]
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": sizes.gbs, "mbs": sizes.mbs}
        answers = self._run("train", shards, self._answering(loss_fn), **options)
        result = self._joined(answers, loss_fn)
        self.updates += 0 if eval_mode else len(result["skip_reasons"])
        return result

    def begin_train_step(
        self,
        loss_fn: LossFunction,
        gbs: int | None = None,
        mbs: int | None = None,
        step_id: str | None = None,
    ) -> None:
        """Open one optimizer step, to which chunks are then added; a `step_id` that was committed is refused.

        gbs, mbs: see `train`; the scheduler advances by the samples of `gbs` rows, whatever the chunks hold.
        """
        sizes = BatchSizes.of(self._config, loss_fn, gbs, mbs)
        options = {"loss_fn": loss_fn, "gbs": sizes.gbs, "mbs": sizes.mbs, "step_id": step_id}
        self._call("begin_train_step", _NOBODY, **options)
        self._open_loss = loss_fn

    def train_microbatch(self, data: BatchedDataDict, *, chunk_id: str | None = None) -> None:
        """Add a chunk of any number of whole samples to the open step; a `chunk_id` that was added is refused."""
        if self._open_loss is None:
            raise out_of_order("train_microbatch", Phase.IDLE)
        loss_fn = self._open_loss
        self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample)
        self._run("train_microbatch", self._split(data, loss_fn), _NOBODY, chunk_id=chunk_id)

    def _split(self, data: BatchedDataDict, loss_fn: LossFunction) -> list[BatchedDataDict]:
        if self._config.token_budgets is None:
            return data.split(self._shards, loss_fn.rows_per_sample)
        # Sums do not depend on who adds what, and ranks with equally many tokens wait less for each other.
        return split_balanced(data, self._shards, loss_fn.rows_per_sample)

    def finish_train_step(self) -> dict[str, Any]:
        """Update the weights by the mean over all chunks' tokens (or sequences); the keys are those of `train`."""
        answers = self._call("finish_train_step", self._answering(self._open_loss))
        self.updates += 1
        return self._joined(answers, self._open_loss)

    def _answering(self, loss_fn: LossFunction | None) -> Collection[int]:
        """Return the ranks whose results are read: totals are equal on all of them, a table is of a shard's rows."""
        return self._first_of_shard if loss_fn is not None and loss_fn.gives_row_table else _FIRST

    def _joined(self, answers: Sequence[Any], loss_fn: LossFunction | None) -> dict[str, Any]:
        results = [answers[rank] for rank in self._answering(loss_fn)]
        tables = [result["row_table"] for result in results if "row_table" in result]
        return results[0] | {"row_table": torch.cat(tables)} if len(tables) > 1 else results[0]

    def abort_train_step(self) -> None:
        """Drop the open or failed step, which then leaves no trace; nothing to do when none is open."""
        self._call("abort_train_step", _NOBODY)

    def save_checkpoint(self, folder: str, *, wait: bool = True) -> None:
        """Write all that the next step depends on into a folder that every rank sees.

        Without `wait` a copy is taken, and written while other calls go on; see `checkpoint_written`. The next save
        waits for it.
        """
        self._call("save_checkpoint", _NOBODY, folder=str(Path(folder).absolute()), wait=wait)

    def checkpoint_written(self, *, wait: bool = True) -> float | None:
        """Return the seconds that writing the last copy took, None while it goes on; `wait` until it is written.

        Raises what writing it raised.
        """
        of_ranks: Sequence[float | None] = self._call("checkpoint_written", wait=wait)
        taken = [seconds for seconds in of_ranks if seconds is not None]
        return max(taken) if len(taken) == len(of_ranks) else None

    def load_checkpoint(self, folder: str, *, weights_only: bool = False) -> None:
        """Set everything back that `save_checkpoint` wrote; with `weights_only` moments and schedule stay as they are.

        The layout may be another one. Raises when the folder does not hold a checkpoint of this model.
        """
        self._call("load_checkpoint", _NOBODY, folder=str(Path(folder).absolute()), weights_only=weights_only)
        self.updates = 0

    def has_unknown_update(self) -> bool:
        """Return whether a rank took an optimizer step whose result was not given, since it or another one raised."""
        taken = self._call("updates")
        return any(count != self.updates for count in taken)

    @property
    def placement(self) -> Placement:
        return self._workers.placement

    @property
    def processes(self) -> Sequence[int]:
        """Return the process id of each rank, on its own machine."""
        return [identity.pid for _, identity in sorted(self._workers.identities.items())]

    def loading_s(self) -> float:
        """Return the seconds that loading weights has taken, on the slowest rank."""
        return max(self._call("loading_s"))

    def gpus(self) -> Sequence[str]:
        found: list[str] = self._call("gpu")
        return [gpu for gpu in found if gpu]

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        return self._call("connect_engines", _FIRST, engines=engines, settings=settings)[0]

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every tensor that a refit sends, by its Hugging Face name."""
        return self._call("prepare_refit_info", _FIRST)[0]

    def weights_digest(self, held_as: str | None = None) -> str:
        """Of all weights as a refit sends them; see `refit.digests.of_all`."""
        return self._call("weights_digest", _FIRST, held_as=held_as)[0]

    def prepare_for_training(self) -> None:
        self._call("prepare_for_training", _NOBODY)

    def finish_training(self) -> None:
        """Do nothing, as in NeMo RL: by policy.offload the next call takes what it does not need from the device."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self._call("prepare_for_lp_inference", _NOBODY, keep_train_buffers=keep_train_buffers)

    def send_weights(self) -> Digests:
        """Stream all weights to the engines; returns the tensors by name, with digests where they are verified."""
        return self._call("send_weights", _FIRST)[0]

    def export_hf(self, folder: str, *, origin: str | None = None, adapters: bool = False) -> None:
        """Write the weights as a Hugging Face folder, which the first rank's machine must see; or adapters alone."""
        self._call("export_hf", _NOBODY, folder=folder, origin=origin, adapters=adapters)

    def shutdown(self) -> None:
        self._workers.shutdown()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _map(self, method: str, data: BatchedDataDict, **kwargs: Any) -> BatchedDataDict:
        """Call a method that answers row by row, padded with copies of the last row to a multiple of the shards."""
        data = data.without(EPISODE)  # such an answer is of a row, whatever episode that is of
        missing = -data.size % self._shards
        whole = data.select_indices([*range(data.size), *[data.size - 1] * missing]) if missing else data
        answers = self._run(method, whole.shard_by_batch_size(self._shards), self._first_of_shard, **kwargs)
        answered = BatchedDataDict.from_batches([answers[rank] for rank in self._first_of_shard])
        return answered.slice(0, data.size)

    def _run(
        self, method: str, shards: Sequence[BatchedDataDict], answering: Collection[int], **kwargs: Any
    ) -> list[Any]:
        # One object for all the ranks of a shard; for one rank alone it travels with the call.
        alone = len(self._shard_of_rank) == len(shards)
        given = shards if alone else [self._workers.share(shard) for shard in shards]
        per_rank: list[Mapping[str, Any]] = [{"data": given[shard]} for shard in self._shard_of_rank]
        return self._call(method, answering, per_rank_kwargs=per_rank, **kwargs)

    def _call(self, method: str, answering: Collection[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every rank; answering: the ranks whose results are read, None for all."""
        self._calls[method] = self._calls.get(method, 0) + 1
        context = f"call {self._calls[method]}"
        return self._workers.run_all(method, answering=answering, context=context, **kwargs)


def open_place(config: RunConfig, *, engines: bool = False) -> OneProcess | RayCluster:
    """Return where the ranks of a command that trains nothing run: here, if one rank is all there is.

    engines: whether it starts engines apart from the ranks. A cluster at RAY_ADDRESS is used where there is one.
    """
    if config.cluster.world_size == 1 and not engines and not os.environ.get("RAY_ADDRESS"):
        return OneProcess(config.cluster)
    from nemo_rl_mcore.driver.actors.cluster import RayCluster  # brings in Ray

    return RayCluster(config.cluster)


def start_frozen(config: RunConfig, cluster: OneProcess | RayCluster) -> Policy:
    temperature = config.logprob_temperature
    return Policy(config.policy, cluster, seed=config.seed, temperature=temperature, trained=False)


@dataclass(frozen=True)
class EmbeddedGeneration:
    """Generation on the training model. The decode loop lives in `rank.megatron.generation`.

    stop_ids: token ids that end a response and belong to it.
    """

    policy: Policy
    stop_ids: tuple[int, ...]

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        return self.policy.generate(data, step=step, stop_ids=self.stop_ids, greedy=greedy)

    def update_weights(self, version: int) -> None:
        """Do nothing: the weights are those of training, as is the memory."""

    def offload(self) -> None:
        """Do nothing, too."""
