"""`MegatronPolicyWorker`: one rank of a policy, a plain class. `RayWorkerGroup` wraps it by `ray.remote`.

B rows of this rank's shard, S sequence length, T new tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.validation import BatchCheck
from nemo_rl_mcore.generation.lengths import check_lengths
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.ops.sampling import SamplingParams, sample_keys
from nemo_rl_mcore.training.batch_sizes import BatchSizes
from nemo_rl_mcore.training.checkpoints import POLICY_FOLDER
from nemo_rl_mcore.training.results import as_result
from nemo_rl_mcore.training.train_step import OptimizerOutcome, Phase, StepResult, TrainStep, TrainStepError
from nemo_rl_mcore.workers.weight_sync import (
    BroadcastMeeting,
    Engines,
    RefitSettings,
    WeightSender,
    open_sender,
)

if TYPE_CHECKING:
    from nemo_rl_mcore.megatron.reference_policy import ReferencePolicy


class MegatronPolicyWorker:
    """Computes log-probabilities, generates and trains with a Megatron-Core model.

    The environment says which rank this is: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, on GPUs, LOCAL_RANK.
    Every rank is sent the rows of its data-parallel shard; tensor- and pipeline-parallel peers are sent the same rows.
    A batch that the model or the loss cannot take is a ValueError by key and row, before the step's phase changes and
    before any collective: those peers refuse it alike, data-parallel ranks see their own shard alone.

    Args:
        config: the policy section, as a `PolicyConfig` or the equal mapping.
        seed: of the random initialisation and of dropout.
        init_reference_model: keep a copy of the initial weights for `get_reference_policy_logprobs`.
        role: "policy", or "value" for a critic: the same model with a value head in place of the output layer.
        temperature: divides the logits in every log-probability, also those of the reference policy and of losses; None
            is generation.temperature, at which the policy's own samples were drawn.
        trained: False builds neither gradient buffers nor an optimizer; what needs one is then a ValueError.

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
    ) -> None:
        self.role = Role(role)
        self.policy = config if isinstance(config, PolicyConfig) else PolicyConfig.model_validate(config)
        self._check = BatchCheck.of(self.policy)
        accelerator.install(int(os.environ.get("LOCAL_RANK", "0")))
        # Megatron is imported after the device is prepared, and never by the driver, which imports this module too.
        from nemo_rl_mcore.megatron import checkpoint, parallel_groups
        from nemo_rl_mcore.megatron.backend import MegatronBackend
        from nemo_rl_mcore.megatron.reference_policy import ReferencePolicy

        parallel_groups.initialize(self.policy.megatron_cfg, seed)
        self._groups = parallel_groups
        self._checkpoint = checkpoint
        self._seed = seed
        self.backend = MegatronBackend(self.policy, self.role, trained=trained, temperature=temperature)
        if self.policy.init_checkpoint is not None:
            folder = Path(self.policy.init_checkpoint) / POLICY_FOLDER
            self._load_weights(folder, of_a_policy=self.role is Role.VALUE)
        self.train_step = TrainStep(self.backend)
        self._sender: WeightSender | None = None
        self._reference: ReferencePolicy | None = (
            ReferencePolicy(self.backend.chunks) if init_reference_model else None
        )

    # Log-probabilities

    def get_logprobs(self, *, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """{"logprobs": fp32 [B, S] on the CPU}: column i is log p of token i; column 0 and right padding are 0.

        data: input_ids [B, S], input_lengths [B]. Evaluation mode; the worker's temperature divides the logits.
        """
        self._check.reading(data)
        return BatchedDataDict(logprobs=self._logprobs(data, micro_batch_size))

    def get_reference_policy_logprobs(
        self, *, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """{"reference_logprobs": fp32 [B, S]}: `get_logprobs` under the weights that the run started from."""
        if self._reference is None:
            raise ValueError(
                "this worker was built with init_reference_model=False, so it has no reference policy"
            )
        self._check.reading(data)
        with self._reference.swapped_in():
            return BatchedDataDict(reference_logprobs=self._logprobs(data, micro_batch_size))

    def _logprobs(self, data: BatchedDataDict, micro_batch_size: int | None) -> torch.Tensor:
        local = self.backend.forward.logprobs(data, micro_batch_size or self.policy.logprob_batch_size)
        return self._groups.broadcast_tensor_from_last_stage(local).cpu()

    def get_topk_logits(
        self, *, data: BatchedDataDict, k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """The k most probable next tokens, as a teacher gives them, on the CPU.

        {"topk_logits": fp32 [B, S, k] divided by the temperature, "topk_indices": int64 global ids, "logsumexp": fp32
        [B, S] over the whole vocabulary, "tail_logmass": fp32 [B, S], the log of the probability of all other ids}.
        Column i is about token i + 1; where that is not real, all is 0.
        """
        self._check.reading(data, k=k)
        size = micro_batch_size or self.policy.logprob_batch_size
        names = ("topk_logits", "topk_indices", "logsumexp", "tail_logmass")
        local = self.backend.forward.best_tokens(data, k, size) or [None] * len(names)
        whole = (self._groups.broadcast_tensor_from_last_stage(values).cpu() for values in local)
        return BatchedDataDict(zip(names, whole, strict=True))

    # Values

    def get_values(self, *, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """{"values": fp32 [B, S] on the CPU} of a worker whose role is value.

        Column i is the value of the state before token i; column 0 and right padding are 0.
        """
        if self.role is not Role.VALUE:
            raise ValueError('this worker is a policy and has no values; build it with role="value"')
        self._check.reading(data)
        local = self.backend.forward.values(data, micro_batch_size or self.policy.logprob_batch_size)
        return BatchedDataDict(values=self._groups.broadcast_tensor_from_last_stage(local).cpu())

    # Generation

    def generate(
        self, *, data: BatchedDataDict, step: int, stop_ids: list[int], greedy: bool = False
    ) -> BatchedDataDict:
        """Answer the prompts: {"tokens": int64 [B, T], "logprobs": fp32 [B, T], "lengths": [B], "finished": bool [B]}.

        data: input_ids [B, P], input_lengths [B], and prompt_index, sample_index int64 [B], which with the seed and
        `step` key the noise of each row.
        Raises ValueError when a prompt and a whole response are longer than `max_total_sequence_length`.
        """
        from nemo_rl_mcore.megatron.generation import GenerationRequest, generate

        self._check.prompts(data)
        check_lengths(data["input_lengths"], self.policy)
        sampling = self.policy.generation
        prompts = [
            row[:length]
            for row, length in zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        ]
        request = GenerationRequest(
            prompts=prompts,
            keys_B=sample_keys(self._seed, step, data["prompt_index"], data["sample_index"]),
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=frozenset(stop_ids),
            batch_size=self.policy.generation_batch_size,
            sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, greedy),
        )
        rows = generate(self.backend.forward, request, self.policy.model.vocab_size)
        return BatchedDataDict(
            tokens=rows.tokens_BT, logprobs=rows.logprobs_BT, lengths=rows.lengths_B, finished=rows.finished_B
        )

    # Training

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each `gbs` rows of all data-parallel ranks together: begin, one chunk, finish.

        gbs, mbs: rows, of whole samples of the loss; None is the config's, whose samples the loss makes rows of.
        Returns what `finish_train_step` returns, with one entry a step in each list. Under `eval_mode` nothing is
        updated. Raises ValueError when the rows are no multiple of the step's.
        """
        self._require_trained("train")
        self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample, eval_mode=eval_mode)
        sizes = BatchSizes.of(self.policy, loss_fn, gbs, mbs)
        batches = sizes.steps(data, self._groups.data_parallel_size())
        if eval_mode:
            return as_result([self._evaluate(batch, loss_fn, sizes.mbs) for batch in batches])
        results: list[StepResult] = []
        for batch in batches:
            opens_a_step = self.train_step.phase is Phase.IDLE
            try:
                self.train_step.begin(loss_fn, gbs=sizes.gbs, mbs=sizes.mbs)
                self.train_step.microbatch(batch)
                results.append(self.train_step.finish())
            except Exception as error:
                if opens_a_step:  # else the step is the caller's, and begin refused
                    self._abort_after(error)
                raise
        return as_result(results)

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
        self.train_step.begin(loss_fn, gbs=sizes.gbs, mbs=sizes.mbs, step_id=step_id)

    def train_microbatch(self, data: BatchedDataDict, chunk_id: str | None = None) -> None:
        """Add the gradients of this rank's rows of a chunk, whole samples, to the open step.

        Raises ValueError for rows that the loss cannot take, by key and row of this shard; the step stays as it is.
        """
        self._require_trained("train_microbatch")
        if (loss_fn := self.train_step.loss_fn) is not None:
            self._check.training(data, loss_fn.columns, loss_fn.rows_per_sample)
        self.train_step.microbatch(data, chunk_id)

    def finish_train_step(self) -> dict[str, Any]:
        """Divide, reduce and step.

        Returns global_loss and grad_norm (fp32 [steps]), all_mb_metrics (a list per metric, with lr, wd,
        global_valid_seqs and global_valid_toks), metric_kinds (how each combines over steps), moe_metrics, mtp_metrics,
        update_successful, skip_reasons (None for a step that was applied), elapsed.
        moe_metrics and mtp_metrics are means over the steps: the load-balancing loss before its coefficient, and the
        cross-entropy of each prediction layer.
        """
        self._require_trained("finish_train_step")
        return as_result([self.train_step.finish()])

    def abort_train_step(self) -> None:
        """Drop the open step and restore what it changed; nothing to do when idle."""
        self.train_step.abort()

    def _require_trained(self, call: str) -> None:
        if not self.backend.trained:
            raise ValueError(
                f"{call} needs a worker that is trained, and this one was built with trained=False"
            )

    def _evaluate(self, batch: BatchedDataDict, loss_fn: LossFunction, mbs: int) -> StepResult:
        started = time.monotonic()
        totals = self.backend.evaluate(batch, loss_fn, mbs)
        lr, wd = self.backend.learning_rate_and_weight_decay()
        outcome = OptimizerOutcome(
            update_successful=False, grad_norm=0.0, lr=lr, wd=wd, skip_reason="eval_mode"
        )
        return StepResult(totals, outcome, time.monotonic() - started)

    def _abort_after(self, error: Exception) -> None:
        try:
            self.train_step.abort()
        except TrainStepError as unknown_outcome:
            error.add_note(str(unknown_outcome))

    # Checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random state; all ranks write to the one folder, which they all see.

        Raises TrainStepError while a step is open.
        """
        self._require_trained("save_checkpoint")
        if self.train_step.phase is not Phase.IDLE:
            raise TrainStepError(
                "save_checkpoint while a train step is open: call finish_train_step or abort_train_step first"
            )
        self._checkpoint.save_policy(self.backend, self.policy.megatron_cfg, self._reference, Path(folder))

    def load_checkpoint(self, folder: str, weights_only: bool = False) -> None:
        """Set everything back that `save_checkpoint` wrote; with `weights_only` moments and schedule stay as they are.

        The layout may be another one than that which saved, and random state is then not set back. An open
        step is dropped; so is one that failed inside the optimizer, for which this is the way out.
        Raises ValueError when the folder holds no checkpoint of this model.
        """
        if not weights_only:
            self._require_trained("load_checkpoint without weights_only=True")
        with suppress(TrainStepError):  # the weights that such a step may have half updated are replaced
            self.train_step.abort()
        if weights_only:
            self._load_weights(Path(folder))
        else:
            self._reference = self._checkpoint.load_policy(
                self.backend, self.policy.megatron_cfg, self._reference, Path(folder)
            )
        self.train_step = TrainStep(self.backend)

    def export_hf(self, folder: str, origin: str | None = None) -> None:
        """Write the weights as a Hugging Face folder, see `megatron.hf_weights.export.save_pretrained`."""
        from nemo_rl_mcore.megatron.hf_weights.export import save_pretrained

        save_pretrained(self.backend.chunks, self.policy, Path(folder), origin=origin)

    def _load_weights(self, folder: Path, *, of_a_policy: bool = False) -> None:
        weights = folder / self._checkpoint.WEIGHTS
        self._checkpoint.load_weights(self.backend.chunks, weights, of_a_policy=of_a_policy)
        self.backend.weights_replaced()

    # Weight sync

    def connect_engines(
        self, engines: Engines, settings: RefitSettings, meeting: BroadcastMeeting | None = None
    ) -> None:
        """Send weights to these engines from now on; see `weight_sync.WeightSender`."""
        self._stop_sending()
        self._sender = open_sender(settings, engines, accelerator.device(), meeting)

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor that a refit sends, by its Hugging Face name."""
        return {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._full_tensors()
        }

    def send_weights(self) -> int:
        """Stream all weights to the engines; returns the number of tensors. Every rank calls it together."""
        if self._sender is None:
            raise ValueError("send_weights before connect_engines: there is no engine to send to")
        return self._sender.send(self._full_tensors())

    def gpu(self) -> str:
        """Which GPU this rank is on, as CUDA_VISIBLE_DEVICES takes it; empty on CPU."""
        return accelerator.device_uuid()

    def _full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from nemo_rl_mcore.megatron.hf_weights.export import full_tensors

        return iter(full_tensors(self.backend.chunks, self.policy))

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    # Life cycle

    def data_parallel_rank(self) -> int:
        """Which shard of a batch this rank is to be sent."""
        return self._groups.data_parallel_rank()

    def prepare_for_training(self) -> None:
        """Ready at once: weights, gradients and optimizer state stay on the device."""

    def prepare_for_lp_inference(self) -> None:
        """Ready at once, as `prepare_for_training`."""

    def shutdown(self) -> None:
        """Leave the process groups."""
        self._stop_sending()
        self._groups.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
