"""`MegatronPolicyWorker`: one rank of a policy, a plain class that `RayWorkerGroup` wraps with `ray.remote`.

B rows of this rank's shard, S sequence length, T new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.config.generation import LogprobSampling
from nemo_rl_mcore.config.policy import RouterReplayConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.data.validation import BatchCheck, check_lengths
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.ops.sampling import SamplingParams, sample_keys
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.checkpoints import POLICY_FOLDER, BackgroundWrite
from nemo_rl_mcore.rank.policy_backend import (
    DTYPES,
    BackendOptions,
    GenerationRequest,
    OnDevice,
    open_backend,
)
from nemo_rl_mcore.rank.refit.digests import Digester, Digests, of_all
from nemo_rl_mcore.rank.refit.sender import (
    BroadcastRendezvous,
    Engines,
    RefitSettings,
    WeightSender,
    open_sender,
)
from nemo_rl_mcore.rank.sums import NEUTRAL
from nemo_rl_mcore.rank.train_step import (
    BatchSizes,
    OptimizerOutcome,
    Phase,
    StepResult,
    TrainStep,
    TrainStepError,
    out_of_order,
)
from nemo_rl_mcore.recipe.rules.policies import checked_policy

if TYPE_CHECKING:  # Megatron is imported by the backend, once the device is prepared
    from nemo_rl_mcore.rank.megatron.backend import MegatronBackend

type BackendFactory = Callable[[PolicyConfig, BackendOptions], MegatronBackend]
"""Builds the backend of this rank, which is named by the environment."""
_GIB = 1 << 30


class MegatronPolicyWorker:
    """Computes log-probabilities, generates and trains with a Megatron-Core model, or with another backend.

    The rank is defined by the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, on GPUs, LOCAL_RANK.
    Every rank gets the rows of its data-parallel shard; tensor- and pipeline-parallel peers get the same rows.
    A batch that the model or the loss cannot take raises a ValueError that names key and row; the phase stays.
    All ranks must make the same calls. An error of one rank is raised on all, with the same class and the rank's number
    in its message.

    Args:
        config: the policy section, as a `PolicyConfig` or an equivalent mapping.
        seed: for the random initialisation and dropout.
        init_reference_model: keep a copy of the initial weights for `get_reference_policy_logprobs`.
        role: "policy", or "value" for a critic: the same model with a value head in place of the output layer.
        temperature: divides the logits in every log-probability, including those of the reference policy and of losses;
            None is generation.temperature, with top_p and top_k for the policy's own log-probabilities.
        trained: False builds neither gradient buffers nor an optimizer; calls that need them then raise ValueError.
        verify_checksums: verify the files of every checkpoint before it is loaded.
        backend: opens the model; the default is the framework that is enabled in the config.

    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        *,
        seed: int = 42,
        init_reference_model: bool = True,
        role: str | Role = Role.POLICY,
        temperature: float | None = None,
        trained: bool = True,
        verify_checksums: bool = True,
        backend: BackendFactory = open_backend,
    ) -> None:
        self.role = Role(role)
        self.policy = checked_policy(config, only_read=not trained)
        if self.role is Role.VALUE:  # its experts are not the policy's
            self.policy = self.policy.model_copy(update={"router_replay": RouterReplayConfig()})
        self._check = BatchCheck.of(self.policy)
        self._seed = seed
        self._sender: WeightSender | None = None
        self._writing: BackgroundWrite | None = None
        sampling = self.policy.generation.logprob_sampling
        if temperature is not None:
            sampling = LogprobSampling(temperature)
        options = BackendOptions(seed, self.role, trained, SamplingParams(*sampling), verify_checksums)
        self.backend = backend(self.policy, options)
        if self.policy.init_checkpoint is not None:
            folder = Path(self.policy.init_checkpoint) / POLICY_FOLDER
            with activity.loading():
                self.backend.load_weights(folder, of_a_policy=self.role is Role.VALUE)
        self.train_step = TrainStep(self.backend)
        self._has_reference = init_reference_model
        if init_reference_model:
            self.backend.keep_reference()

    # Inference

    def get_logprobs(
        self,
        *,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        require_router_replay: bool = False,
        trained_only: bool = False,
    ) -> BatchedDataDict:
        """Return {"logprobs": fp32 [B, S] on the CPU}: column i is log p of token i; column 0 and right padding are 0.

        A token outside the filters has -inf.
        data: input_ids [B, S], input_lengths [B]. trained_only: compute only tokens marked by token_mask [B, S]; others
        are 0. With policy.router_replay the pass replays routed_experts [B, S, L, K]; without that column it also
        returns it, with the experts that it chose. require_router_replay: refuse a pass without routes to replay.
        """
        with self.backend.called_together("get_logprobs"):
            replays = self.policy.router_replay.enabled
            if require_router_replay and not (replays and ROUTED_EXPERTS in data):
                raise RefusedError(
                    "get_logprobs(require_router_replay=True) needs policy.router_replay.enabled: true and the column "
                    f"{ROUTED_EXPERTS}; allowed here: False",
                    code="no-router-replay",
                )
            self._check.reading(data, trained_only=trained_only)
            self._keep_on_device(OnDevice.WEIGHTS)
        rows = micro_batch_size or self.policy.logprob_batch_size
        if replays and ROUTED_EXPERTS not in data:
            found, routes = self.backend.logprobs_and_routes(data, rows, trained_only=trained_only)
            return BatchedDataDict({"logprobs": found, ROUTED_EXPERTS: routes})
        return BatchedDataDict(logprobs=self.backend.logprobs(data, rows, trained_only=trained_only))

    def get_reference_policy_logprobs(
        self, *, data: BatchedDataDict, micro_batch_size: int | None = None, trained_only: bool = False
    ) -> BatchedDataDict:
        """Return {"reference_logprobs": fp32 [B, S]}: `get_logprobs` under the run's initial weights, unfiltered."""
        if not self._has_reference:
            raise RefusedError(
                "this worker has no reference policy: it was built with init_reference_model=False",
                code="no-reference-policy",
            )
        with self.backend.called_together("get_reference_policy_logprobs"):
            self._check.reading(data, trained_only=trained_only)
            self._keep_on_device(OnDevice.WEIGHTS)
        rows = micro_batch_size or self.policy.logprob_batch_size
        logprobs = self.backend.logprobs(data, rows, trained_only=trained_only, of_reference=True)
        return BatchedDataDict(reference_logprobs=logprobs)

    def get_topk_logits(
        self,
        *,
        data: BatchedDataDict,
        k: int,
        micro_batch_size: int | None = None,
        trained_only: bool = False,
    ) -> BatchedDataDict:
        """Return the fields of `TopKLogits`; column i is the distribution of token i + 1, or 0 if not computed."""
        with self.backend.called_together("get_topk_logits"):
            self._check.reading(data, k=k, trained_only=trained_only)
            self._keep_on_device(OnDevice.WEIGHTS)
        rows = micro_batch_size or self.policy.logprob_batch_size
        return BatchedDataDict(vars(self.backend.topk_logits(data, k, rows, trained_only=trained_only)))

    def get_values(self, *, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """Return a critic's {"values": fp32 [B, S] on the CPU}: column i is the value before token i; column 0 is 0."""
        if self.role is not Role.VALUE:
            raise RefusedError(
                'this worker is a policy and has no values; build it with role="value"', code="no-value-head"
            )
        with self.backend.called_together("get_values"):
            self._check.reading(data)
            self._keep_on_device(OnDevice.WEIGHTS)
        rows = micro_batch_size or self.policy.logprob_batch_size
        return BatchedDataDict(values=self.backend.values(data, rows))

    def generate(
        self, *, data: BatchedDataDict, step: int, stop_ids: list[int], greedy: bool = False
    ) -> BatchedDataDict:
        """Sample responses, and return the fields of `GeneratedRows`; ValueError if a prompt leaves no room for one.

        data: input_ids [B, P], input_lengths [B], and prompt_index, sample_index int64 [B], which together with the
        seed and `step` are the key of each row's sampling noise. Optional: turn_index int64 [B], part of the key, 0 for
        the first turn; stop_strings, a tuple per row, in addition to those of the config.
        """
        policy, sampling = self.policy, self.policy.generation
        with self.backend.called_together("generate"):
            self._check.prompts(data)
            check_lengths(data["input_lengths"], policy)
            stop_strings: Any = data.get("stop_strings", [()] * data.size)
            stops = [StopConditions.of(policy, stop_ids, strings) for strings in stop_strings]
            self._keep_on_device(OnDevice.WEIGHTS)
        rows: Any = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        request = GenerationRequest(
            prompts=[row[:length] for row, length in rows],
            keys_B=sample_keys(
                self._seed, step, data["prompt_index"], data["sample_index"], data.get("turn_index")
            ),
            max_new_tokens=sampling.max_new_tokens,
            stops=stops,
            sampling=SamplingParams(*sampling.logprob_sampling, greedy),
            batch_size=policy.generation_batch_size,
            longest=policy.max_total_sequence_length if policy.generation.fit_to_sequence else None,
        )
        return BatchedDataDict(vars(self.backend.generate(request)))

    def _keep_on_device(self, parts: OnDevice) -> None:
        """If policy.offload is set and no step is open, move these parts to the device and all others off it."""
        if self.policy.offload != "none" and self.train_step.phase is Phase.IDLE:
            self.backend.keep_on_device(parts)

    # Training

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per `gbs` rows of all data-parallel ranks together: begin, one chunk, finish.

        gbs, mbs: rows, multiples of the loss's rows per sample; None uses the config's sizes, which are in samples.
        Returns the result of `finish_train_step`, with one entry per step in each list; ValueError if gbs does not
        divide the rows. eval_mode: compute loss and metrics of all rows as one batch, of any size, without an update.
        """
        self._require_trained("train")
        with self.backend.called_together("train"):
            self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample, eval_mode=eval_mode)
            sizes = BatchSizes.of(self.policy, loss_fn, gbs, mbs)
            steps = [] if eval_mode else sizes.steps(data, self.backend.data_parallel_size)
            self._keep_on_device(OnDevice.WEIGHTS if eval_mode else OnDevice.EVERYTHING)
        if eval_mode:
            started = time.monotonic()
            totals = self.backend.evaluate(data, loss_fn, sizes.mbs)
            lr, wd = self.backend.learning_rate_and_weight_decay()
            outcome = OptimizerOutcome(False, grad_norm=0.0, lr=lr, wd=wd, skip_reason="eval_mode")
            return as_result([StepResult(totals, outcome, time.monotonic() - started)], self.policy)
        results: list[StepResult] = []
        for batch in steps:
            opens_a_step = self.train_step.phase is Phase.IDLE
            try:
                results.append(self.train_step.whole(batch, loss_fn, gbs=sizes.gbs, mbs=sizes.mbs))
            except Exception as error:
                if opens_a_step:  # otherwise `begin` refused, and the open step is the caller's
                    try:
                        self.train_step.abort()
                    except TrainStepError as unknown_outcome:
                        error.add_note(str(unknown_outcome))
                raise
        return as_result(results, self.policy)

    def begin_train_step(
        self,
        loss_fn: LossFunction,
        gbs: int | None = None,
        mbs: int | None = None,
        step_id: str | None = None,
    ) -> None:
        """Open a train step; the scheduler advances by the samples of `gbs` rows. gbs, mbs: see `train`."""
        self._require_trained("begin_train_step")
        sizes = BatchSizes.of(self.policy, loss_fn, gbs, mbs)
        prepare = partial(self._keep_on_device, OnDevice.EVERYTHING)
        self.train_step.begin(loss_fn, gbs=sizes.gbs, mbs=sizes.mbs, step_id=step_id, prepare=prepare)

    def train_microbatch(self, data: BatchedDataDict, chunk_id: str | None = None) -> None:
        """Add the gradients of a chunk to the open step; data: this rank's rows, whole samples.

        Rows that the loss cannot take raise a ValueError with key and row, and a chunk that another rank lacks raises
        UnequalChunksError; the step then stays as it was.
        """
        self._require_trained("train_microbatch")
        self.train_step.microbatch(
            data,
            chunk_id,
            lambda loss_fn: self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample),
        )

    def finish_train_step(self) -> dict[str, Any]:
        """Normalise and reduce the gradients, and run the optimizer.

        Returns loss = global_loss and grad_norm (fp32 [steps]); all_mb_metrics (a list per metric, including lr, wd,
        global_valid_seqs and global_valid_toks); metric_kinds (rules that combine metrics of steps); update_successful;
        skip_reasons (None for an applied step); elapsed = train_elapsed_seconds; and of this rank: rank, model_dtype,
        peak_memory_gib and, on a GPU, gpu_name. Means over the steps: moe_metrics of an MoE model (the
        load-balancing loss before its coefficient), mtp_metrics of one with prediction layers (cross-entropy of each).
        """
        self._require_trained("finish_train_step")
        return as_result([self.train_step.finish()], self.policy)

    def abort_train_step(self) -> None:
        """Drop the open step and undo its changes; no-op when idle."""
        self.train_step.abort()

    def updates(self) -> int:
        """Return the number of optimizer steps, including skipped ones, since the start or `load_checkpoint`."""
        return self.train_step.updates

    def _require_trained(self, call: str) -> None:
        if not self.backend.trained:
            raise RefusedError(
                f"{call} needs a worker that is trained, and this one was built with trained=False",
                code="not-trained",
            )

    # Checkpoints

    def save_checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write weights, optimizer, schedule and random state; wait=False: see `checkpoint_written`.

        Raises, on all ranks with nothing written, TrainStepError while a step is open, and ValueError for a folder in
        use.
        """
        with self.backend.called_together("save_checkpoint"):
            self._require_trained("save_checkpoint")
            if self.train_step.phase is not Phase.IDLE:
                raise out_of_order("save_checkpoint", self.train_step.phase)
            self._keep_on_device(OnDevice.EVERYTHING)
        if self._writing is not None:
            self._writing.join()  # its errors are raised by `checkpoint_written` only
            self._writing = None
        self._writing = self.backend.save(Path(folder), self.train_step.committed_ids, wait=wait)

    def checkpoint_written(self, wait: bool = True) -> float | None:
        """Return the background write's duration in seconds, None while it runs; `wait` blocks until its end.

        Raises OSError on all ranks if one of them could not write, and ValueError if there was no background write.
        """
        if self._writing is None:
            raise RefusedError(
                "checkpoint_written before save_checkpoint(folder, wait=False)", code="no-copy"
            )
        return self._writing.seconds(wait=wait)

    def load_checkpoint(self, folder: str, weights_only: bool = False) -> None:
        """Restore the state that `save_checkpoint` wrote; with `weights_only` moments, schedule and step_ids stay.

        Random state is restored into the same parallel layout only. An open step is dropped, also after a failure
        inside the optimizer, from which no other call recovers. Raises ValueError on all ranks for a broken folder or
        another model's.
        """
        with self.backend.called_together("load_checkpoint"):
            if not weights_only:
                self._require_trained("load_checkpoint without weights_only=True")
            self._keep_on_device(OnDevice.EVERYTHING)
        with suppress(TrainStepError):  # half updated weights are about to be replaced
            self.train_step.abort()
        committed: Sequence[str] = self.train_step.committed_ids
        if weights_only:
            self.backend.load_weights(Path(folder))
        else:
            committed = self.backend.load(Path(folder))
        self.train_step = TrainStep(self.backend, committed)

    def export_hf(self, folder: str, origin: str | None = None, adapters: bool = False) -> None:
        """Write the weights to a new Hugging Face folder; `origin`: the model that training started from.

        adapters: write only these, in the peft library's format; otherwise they are merged into the weights.
        """
        with self.backend.called_together("export_hf"):
            self._keep_on_device(OnDevice.WEIGHTS)
        self.backend.export_hf(Path(folder), origin, adapters=adapters)

    # Weight sync and life cycle

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        """Set the engines that receive the weights, see `sender.WeightSender`; returns a broadcast's rendezvous."""
        if self._sender is not None:
            self._sender.close()
        self._sender = open_sender(settings, engines, self.backend.device)
        return self._sender.rendezvous

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every tensor that a refit sends, by Hugging Face name."""
        with self.backend.called_together("prepare_refit_info"):
            self._keep_on_device(OnDevice.WEIGHTS)
        return {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.backend.full_tensors()
        }

    def weights_digest(self, *, held_as: str | None = None) -> str:
        """Return a digest of all weights as a refit sends them, cast to the dtype `held_as`; called on every rank."""
        with self.backend.called_together("weights_digest"):
            self._keep_on_device(OnDevice.WEIGHTS)
        digester = Digester(held_as)
        for name, tensor in self.backend.full_tensors():
            activity.advance(f"reading {name}")
            digester.add(name, tensor)
        return of_all(digester.digests())

    def send_weights(self) -> Digests:
        """Stream all weights to the engines, and return their digests, see `WeightSender.send`; collective."""
        if self._sender is None:
            raise RefusedError(
                "send_weights before connect_engines: there is no engine to send to", code="no-engines"
            )
        with self.backend.called_together("send_weights"):
            self._keep_on_device(OnDevice.WEIGHTS)
        sent = self._sender.send(self.backend.full_tensors())
        if self.policy.offload == "all":
            with self.backend.called_together("the end of send_weights"):
                self._keep_on_device(OnDevice.NOTHING)
        return sent

    def gpu(self) -> str:
        """Return this rank's GPU, as CUDA_VISIBLE_DEVICES takes it; empty on CPU."""
        return accelerator.device_uuid(self.backend.device)

    def loading_s(self) -> float:
        """Return the time in seconds spent on loading weights."""
        return activity.loading_s

    def data_parallel_rank(self) -> int:
        """Return the index of this rank's batch shard."""
        return self.backend.data_parallel_rank

    def prepare_for_training(self) -> None:
        """Move weights, gradients and optimizer state to the device; training calls do so themselves."""
        with self.backend.called_together("prepare_for_training"):
            self._keep_on_device(OnDevice.EVERYTHING)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Move the weights to the device and, unless policy.offload is none, everything else off it.

        keep_train_buffers: keep gradients and optimizer state there; without it, an open step raises TrainStepError.
        """
        with self.backend.called_together("prepare_for_lp_inference"):
            takes_buffers = self.policy.offload != "none" and not keep_train_buffers
            if takes_buffers and self.train_step.phase is not Phase.IDLE:
                call = "prepare_for_lp_inference without keep_train_buffers=True"
                raise out_of_order(call, self.train_step.phase)
            parts = OnDevice.EVERYTHING if keep_train_buffers else OnDevice.WEIGHTS
            self._keep_on_device(parts)

    def shutdown(self) -> None:
        """Finish background writes and leave the process groups."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.backend.shutdown()


def as_result(steps: Sequence[StepResult], policy: PolicyConfig) -> dict[str, Any]:
    """Combine steps into the result of `MegatronPolicyWorker.finish_train_step`, with an entry per step."""
    totals, outcomes = [step.totals for step in steps], [step.outcome for step in steps]
    kinds = {name: kind for step in totals for name, kind in step.kinds.items()}
    metrics: dict[str, list[float]] = {
        **{name: [s.metrics.get(name, NEUTRAL[kind]) for s in totals] for name, kind in kinds.items()},
        **{name: [getattr(outcome, name) for outcome in outcomes] for name in ("lr", "wd")},
        "global_valid_seqs": [step.valid_seqs for step in totals],
        "global_valid_toks": [step.valid_toks for step in totals],
    }
    row_tables = [step.row_table for step in totals if step.row_table is not None]
    of_layers = {
        "moe_metrics": [step.moe_metrics for step in totals] if policy.model.num_moe_experts else [],
        "mtp_metrics": [step.mtp_metrics for step in totals] if policy.model.mtp_num_layers else [],
    }
    means: dict[str, dict[str, float]] = {}
    for key, steps_of_layer in of_layers.items():
        if steps_of_layer:
            names = dict.fromkeys(chain.from_iterable(steps_of_layer))
            means[key] = {name: fmean(one[name] for one in steps_of_layer if name in one) for name in names}
    gpu_name, elapsed = accelerator.gpu_name(), sum(step.elapsed for step in steps)
    loss = torch.tensor([step.metrics["loss"] for step in totals])
    return {
        **({"row_table": torch.cat(row_tables)} if row_tables else {}),
        **means,
        **({"gpu_name": gpu_name} if gpu_name else {}),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "model_dtype": DTYPES[policy.precision],
        "loss": loss,
        "global_loss": loss,
        "grad_norm": torch.tensor([outcome.grad_norm for outcome in outcomes]),
        "all_mb_metrics": metrics,
        "metric_kinds": kinds,
        "update_successful": all(outcome.update_successful for outcome in outcomes),
        "skip_reasons": [outcome.skip_reason for outcome in outcomes],
        "elapsed": elapsed,
        "train_elapsed_seconds": elapsed,
        "peak_memory_gib": accelerator.peak_memory_bytes() / _GIB,
    }
