"""The train side of the backend: Megatron's model, gradients, optimizer and random state behind the step's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.logits_cache import LogitsCache
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import UnequalCallsError, together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.context_parallel import slices_of_a_sample
from nemo_rl_mcore.rank.megatron.forward_backward import ForwardBackward, evaluation_mode
from nemo_rl_mcore.rank.megatron.grad_sync import deferred_grad_sync, drop_reductions, finalize_gradients
from nemo_rl_mcore.rank.megatron.hf_weights.load import load_pretrained
from nemo_rl_mcore.rank.megatron.hook_check import require_hook
from nemo_rl_mcore.rank.megatron.model import build_model, freeze, in_precision, wrap_data_parallel
from nemo_rl_mcore.rank.megatron.optimizer import build_optimizer, build_scheduler
from nemo_rl_mcore.rank.megatron.output_processor import fused_processor, unfused_processor
from nemo_rl_mcore.rank.megatron.overlapped_grad_sync import OverlappedGradSync
from nemo_rl_mcore.rank.megatron.passes import Passes
from nemo_rl_mcore.rank.megatron.transforms import transforms
from nemo_rl_mcore.rank.megatron.value_head import value_head_of
from nemo_rl_mcore.rank.policy_backend import BackendOptions
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import UnequalChunksError

_CALLS_OF_A_STEP = ("begin_train_step", "train_microbatch", "finish_train_step")


@dataclass(frozen=True)
class _Snapshot:
    generators: list[torch.Tensor]
    tracker: dict[str, torch.Tensor]
    buffers: list[torch.Tensor]


class MegatronTrainBackend:
    """Implements `training.train_step.TrainStepBackend` for one rank. Its process groups must be initialised.

    Without training there is no optimizer and no schedule, and the step's methods are not called.
    """

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        self.trained = options.trained
        self.config, models = build_model(policy)
        if policy.model_name is not None:
            with activity.loading(), together("the end of loading the weights"):
                load_pretrained(policy, models)  # before the optimizer takes its fp32 copies
        require_hook(models)
        for transform in transforms(policy, options):
            transform(models)
        modules = in_precision(self.config, models)
        self._wrapped = wrap_data_parallel(policy, self.config, modules) if options.trained else []
        self.chunks: list[MegatronModule] = [*self._wrapped] or freeze(modules)
        if options.trained:
            self.optimizer = build_optimizer(policy, self._wrapped)
            self.scheduler = build_scheduler(policy, self.optimizer)
        self.overlaps_grad_sync = policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
        self._overlapped = OverlappedGradSync(self.config, self._wrapped)
        self.forward = ForwardBackward(
            self.config,
            self.chunks,
            _passes(policy, self.chunks, options),
            _sequence_multiple(policy),
            policy.token_budgets,
        )

    def snapshot(self) -> _Snapshot:
        """Return the random generators, which dropout draws from, and the buffers that routers count in."""
        buffers = [buffer.clone() for buffer in self._buffers()]
        return _Snapshot(accelerator.device_rng_states(), _rng_tracker().get_states(), buffers)

    def restore(self, snapshot: _Snapshot) -> None:
        """Set random generators and buffers back."""
        accelerator.restore_device_rng_states(snapshot.generators)
        _rng_tracker().set_states(snapshot.tracker)
        for buffer, saved in zip(self._buffers(), snapshot.buffers, strict=True):
            buffer.copy_(saved)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for chunk in self._wrapped for buffer in chunk.module.buffers()]

    def weights_replaced(self) -> None:
        """Have the optimizer, if there is one, take its copies from the weights again."""
        if self.trained:
            self.optimizer.reload_model_params()

    @contextmanager
    def called_together(self, call: str) -> Iterator[None]:
        """See `TrainStepBackend.called_together`; a rank whose caller is late is waited for with patience."""
        try:
            with together(call):
                yield
        except UnequalCallsError as error:
            if call not in _CALLS_OF_A_STEP:
                raise
            raise UnequalChunksError(
                f"{error}; each chunk too, with no rows for a rank that has none"
            ) from error

    def done_together(self, call: str) -> AbstractContextManager[None]:
        """See `TrainStepBackend.done_together`."""
        return together(f"the end of {call}", parallel_groups.computing_ranks())

    def zero_grad(self) -> None:
        """Clear the gradient buckets, the optimizer's gradients and what auxiliary losses have added up."""
        drop_reductions(self._wrapped)
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forward.auxiliary.reset(self.chunks)

    def deferred_grad_sync(self) -> AbstractContextManager[None]:
        """See `megatron.grad_sync.deferred_grad_sync`."""
        return deferred_grad_sync(self.config, self._wrapped)

    def overlapped_grad_sync(self, factor: float) -> AbstractContextManager[bool]:
        """See `megatron.overlapped_grad_sync`."""
        return self._overlapped.begin(factor)

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int
    ) -> LocalSums:
        """Add the gradients of the rows' un-normalised loss; return its sums on this rank."""
        return self.forward.loss_sums(data, loss_fn, micro_batch_size, forward_only=False)

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
        """Return the loss and metrics of the rows of all ranks, without gradients."""
        with evaluation_mode(self.chunks):
            with self.done_together("an evaluation"):
                sums = self.forward.loss_sums(data, loss_fn, micro_batch_size, forward_only=True)
            return self._totals(sums)

    def reduce(self, sums: LocalSums) -> StepTotals:
        """Return the totals of all ranks, with the auxiliary losses since the gradients were cleared."""
        totals = self._totals(sums)
        moe_metrics, mtp_metrics = self.forward.auxiliary.take_metrics()
        return replace(totals, moe_metrics=moe_metrics, mtp_metrics=mtp_metrics)

    def reduce_counts(self, data: BatchedDataDict) -> StepTotals:
        """Return the counts of the rows of all ranks, without a metric."""
        return self._totals(LocalSums.counts(data))

    def _totals(self, sums: LocalSums) -> StepTotals:
        """Sum over data-parallel ranks on the last stage, then hand the totals to the other pipeline stages."""
        gather = parallel_groups.gather_over_data_parallel_ranks
        totals = sums.reduce(gather) if parallel_groups.is_last_stage() else None
        return parallel_groups.broadcast_from_last_stage(totals)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the local gradient buckets."""
        for chunk in self._wrapped:
            chunk.scale_gradients(factor)

    def finalize_gradients(self) -> None:
        """See `megatron.grad_sync.finalize_gradients`."""
        finalize_gradients(self._wrapped)

    def gradient_norm(self) -> float:
        """Return the L2 norm of the reduced gradients over all ranks, before clipping."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def optimizer_step(self, increment: int) -> bool:
        """Clip, update the weights and advance the scheduler by `increment` samples if they were updated."""
        successful, _grad_norm, _zeros = cast("tuple[bool, Any, Any]", self.optimizer.step())
        if successful:
            self.scheduler.step(increment)
        return bool(successful)

    def learning_rate_and_weight_decay(self) -> tuple[float, float]:
        """Return the schedule's present values (parameter groups may scale them)."""
        group = self.optimizer.param_groups[0]
        return self.scheduler.get_lr(group), self.scheduler.get_wd(group)


def _rng_tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def _passes(policy: PolicyConfig, chunks: list[MegatronModule], options: BackendOptions) -> Passes:
    config, vocab_size = policy.megatron_cfg, policy.model.vocab_size
    fused = config.use_fused_linear_logprobs
    cache = LogitsCache.of(config.fused_linear_logprobs_cache_bytes if fused else 0)
    linear_options = LinearLogprobsOptions(
        chunk_size=config.fused_linear_logprobs_chunk_size,
        chunk_bytes=config.fused_linear_logprobs_chunk_bytes,
        vocab_size=vocab_size,
        cache_bytes=cache.limit,
        cache_bytes_per_logit=cache.bytes_per_logit,
        accumulate_main_grad=options.trained and _head_adds_to_main_grad(policy),
    )
    return Passes(
        token_processor=fused_processor(linear_options) if fused else unfused_processor(vocab_size),
        temperature=options.temperature,
        linear_options=linear_options,
        value_head=value_head_of(chunks[-1]),
    )


def _head_adds_to_main_grad(policy: PolicyConfig) -> bool:
    """Return whether the output weight's gradient may be summed in its gradient bucket, tile by tile.

    A 16-bit bucket would round every tile's part. Multi-token prediction uses the weight a second time, through
    autograd, whose gradient the data-parallel hook drops once a weight says that its own is in place.
    """
    ddp = policy.megatron_cfg.distributed_data_parallel_config
    wide = ddp.grad_reduce_in_fp32 or policy.precision == "float32"
    return wide and not policy.model.mtp_num_layers


def _sequence_multiple(policy: PolicyConfig) -> int:
    """Return what batches are padded to: each rank that shares a sequence has an equal part of it."""
    megatron = policy.megatron_cfg
    parts = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    return parts * slices_of_a_sample(megatron.context_parallel_size)
