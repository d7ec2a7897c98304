"""The train side of the backend: Megatron's model, gradients, optimizer and random state behind the step's protocol."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.logits_cache import LogitsCache
from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch, in_batch_order
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import UnequalCallsError, together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.auxiliary_losses import (
    AuxiliaryLosses,
    AuxiliaryTerms,
    without_prediction_layers,
)
from nemo_rl_mcore.rank.megatron.batching import Batching, attention_inputs
from nemo_rl_mcore.rank.megatron.context_parallel import slices_of_a_sample
from nemo_rl_mcore.rank.megatron.grad_sync import (
    OverlappedGradSync,
    deferred_grad_sync,
    drop_reductions,
    finalize_gradients,
)
from nemo_rl_mcore.rank.megatron.guard import Collect, Guard
from nemo_rl_mcore.rank.megatron.hf_weights.load import load_pretrained
from nemo_rl_mcore.rank.megatron.model import build_model, freeze, in_precision, wrap_data_parallel
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel
from nemo_rl_mcore.rank.megatron.optimizer import build_optimizer, build_scheduler
from nemo_rl_mcore.rank.megatron.output_processor import fused_processor, unfused_processor
from nemo_rl_mcore.rank.megatron.passes import LossTriple, ModelPass, Passes
from nemo_rl_mcore.rank.megatron.transforms import transforms
from nemo_rl_mcore.rank.megatron.value_head import value_head_of
from nemo_rl_mcore.rank.policy_backend import BackendOptions
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import UnequalChunksError

MicrobatchIterator = Iterator[tuple[Microbatch, AuxiliaryTerms | None]]


@contextmanager
def evaluation_mode(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, no dropout, no gradients, no layers that only training needs; all comes back also after an exception."""
    training = [module for module in modules if module.training]
    for module in training:
        module.eval()
    try:
        with torch.no_grad(), without_prediction_layers(modules):
            yield
    finally:
        for module in training:
            module.train()


@dataclass(frozen=True)
class ForwardBackward:
    """The model of this rank and how its outputs are taken.

    passes: what can be asked of it.
    sequence_multiple: batches are padded to a multiple of this many columns.
    token_budgets: what microbatches are sized by; None for a fixed number of rows.
    """

    config: TransformerConfig
    chunks: list[MegatronModule]
    passes: Passes
    sequence_multiple: int
    token_budgets: TokenBudgets | None = None

    @cached_property
    def batching(self) -> Batching:
        """Return how rows become microbatches."""
        return Batching(self.config, self.sequence_multiple, self.token_budgets)

    @cached_property
    def auxiliary(self) -> AuxiliaryLosses:
        """Return the losses that layers attach to their own backward pass."""
        return AuxiliaryLosses(self.config, self.chunks)

    def logprobs(
        self, data: BatchedDataDict, micro_batch_size: int, *, trained_only: bool = False
    ) -> torch.Tensor | None:
        """Return the log-probabilities of `input_ids` [B, S] as fp32 [B, S]; None off the last pipeline stage.

        Column i is log p of token i given those before it; column 0 and the right padding are 0.
        trained_only: so is all that `token_mask` does not mark.
        """
        kind = self.passes.logprobs(trained_only=trained_only)
        return (self._read(data, micro_batch_size, kind) or [None])[0]

    def values(self, data: BatchedDataDict, micro_batch_size: int) -> torch.Tensor | None:
        """Return a critic's values as fp32 [B, S]; None off the last pipeline stage.

        Column i is the value of the state before token i; column 0 and the right padding are 0.
        """
        return (self._read(data, micro_batch_size, self.passes.values()) or [None])[0]

    def topk(
        self, data: BatchedDataDict, k: int, micro_batch_size: int, *, trained_only: bool = False
    ) -> list[torch.Tensor]:
        """Return the k best next tokens per position: logits and ids [B, S, k], logsumexp and tail's log-mass [B, S].

        Empty off the last pipeline stage; 0 where the next token is not real or, with trained_only, not marked by
        `token_mask`.
        """
        return self._read(data, micro_batch_size, self.passes.topk(k, trained_only=trained_only))

    def loss_sums(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int, *, forward_only: bool
    ) -> LocalSums:
        """Return the loss sums of the rows on this rank (empty off the last pipeline stage).

        Unless `forward_only`, the gradients of the un-normalised loss are added to the local gradient buckets.
        """
        parts = self._run(
            self.batching.for_training(data, micro_batch_size, loss_fn.rows_per_sample),
            self.passes.loss(loss_fn),
            trained_by=None if forward_only else loss_fn,
        )
        total = LocalSums()
        for part in parts:
            total.add(part)
        return total

    def _read(self, data: BatchedDataDict, micro_batch_size: int, kind: ModelPass) -> list[torch.Tensor]:
        """Return what a pass without gradients says of the batch, in its order; nothing off the last pipeline stage."""
        microbatches = self.batching.for_logprobs(data, micro_batch_size)
        with evaluation_mode(self.chunks):
            parts = self._run(microbatches, kind)
        if not parts:
            return []
        places = [rows for rows, _ in parts]
        shape = data["input_ids"].shape
        return [
            in_batch_order(zip(places, values, strict=True), *shape)
            for values in zip(*(values for _, values in parts), strict=True)
        ]

    def _run(
        self, on_cpu: list[Microbatch], kind: ModelPass, *, trained_by: LossFunction | None = None
    ) -> list[Any]:
        """Run microbatches through the schedule: forward only, unless they are trained by a loss.

        An error of a loss is raised when the schedule has ended, since other ranks take part in it: see `Guard`.
        """
        terms = [None if trained_by is None else self.auxiliary.terms(part, trained_by) for part in on_cpu]
        microbatches = [microbatch.to(accelerator.device()) for microbatch in on_cpu]
        rows, columns = microbatches[0].input_ids.shape
        guard = Guard(self.config)
        iterators: list[Any] = [iter(zip(microbatches, terms, strict=True)) for _ in self.chunks]
        try:
            parts = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, kind, guard),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=[*self.chunks] if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(microbatches),
                seq_length=columns
                * self.config.context_parallel_size,  # of the whole rows, which Megatron cuts
                micro_batch_size=rows,
                forward_only=trained_by is None,
            )
        finally:
            if self.config.num_moe_experts is not None:
                _forget_routing(self.chunks)
        guard.raise_error()
        return parts

    def _forward_step(
        self,
        kind: ModelPass,
        guard: Guard,
        microbatches: MicrobatchIterator,
        model: Any,
        return_schedule_plan: bool = False,
    ) -> Any:
        """One microbatch forward; or, for the schedule that overlaps expert communication, only the plan of it."""
        microbatch, terms = next(microbatches)
        activity.advance("a microbatch")
        collect = guard.loss(partial(kind.collect, microbatch))
        if return_schedule_plan:
            plan = model.build_schedule_plan(**self._model_inputs(microbatch, terms, kind, model))
            return plan, partial(self._collect_of_plan, collect, terms)

        def run() -> tuple[Any, Collect]:
            output = model(**self._model_inputs(microbatch, terms, kind, model))
            if terms is not None:
                self.auxiliary.follow(terms, output)
            return output, collect

        return guard.forward_step(model, microbatch.input_ids, run)

    def _model_inputs(
        self,
        microbatch: Microbatch,
        terms: AuxiliaryTerms | None,
        kind: ModelPass,
        model: torch.nn.Module,
    ) -> dict[str, Any]:
        mask_BS = microbatch.to_model(kind.wanted(microbatch.rows))
        _, position_ids, _ = causal_inputs(microbatch.rows["input_ids"])
        inputs = {
            "input_ids": microbatch.input_ids,
            "position_ids": microbatch.to_model(position_ids),
            "output_processor": kind.processor,
            "output_processor_context": kind.context(microbatch, mask_BS),
        }
        inputs |= attention_inputs(microbatch, self.config)
        if terms is not None:
            inputs |= self.auxiliary.model_inputs(terms, microbatch, mask_BS, model)
        return inputs

    def _collect_of_plan(
        self, collect: Collect, terms: AuxiliaryTerms | None, *outputs: torch.Tensor
    ) -> LossTriple:
        """Return the loss of a plan's outputs: a plan has no output before it runs, and its outputs come one by one."""
        first, *more = outputs
        output = (first, *more) if more else first
        if terms is not None:
            self.auxiliary.follow(terms, output)
        return collect(output)


def _forget_routing(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the last microbatch's graph, which token dispatchers hold by the routers' shares.

    It holds the model, and so its groups and their threads, where Python's collector cannot see it.
    """
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer):
                kept = vars(layer.token_dispatcher)
                kept |= {name: None for name, value in kept.items() if _has_graph(value)}


def _has_graph(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def causal_inputs(input_ids_BL: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, None]:
    """GPTModel's input_ids, position_ids and attention mask for the tokens from `start` on.

    No mask is needed: the layers are causal, and rows are padded on the right, so that no token sees the padding.
    """
    rows, length = input_ids_BL.shape
    positions = torch.arange(start, length, device=input_ids_BL.device).expand(rows, -1)
    return input_ids_BL[:, start:], positions, None


FIRST_VERSION_WITH_HOOK = "0.18.0"


def require_hook(models: Iterable[LanguageModel]) -> None:
    """Have the first pass of each last stage raise RuntimeError unless it calls the processor that it is handed.

    models: the stages on this rank. Raises RuntimeError at once for a forward that does not take the keyword.
    Both errors name the version to install.
    """
    for model in models:
        try:
            inspect.signature(model.forward).bind_partial(output_processor=None)
        except TypeError as error:
            raise _no_hook(model, "does not take") from error
        if model.post_process:
            _FirstPass(model)


class _FirstPass:
    """Watches a model until one pass has called its processor."""

    def __init__(self, model: LanguageModel):
        self._handed_over = self._called = False
        self._hooks = (
            model.register_forward_pre_hook(self._hand_over, with_kwargs=True),
            model.register_forward_hook(self._check),
        )

    def _hand_over(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        processor = kwargs.get("output_processor")
        self._handed_over, self._called = processor is not None, False
        if processor is None:  # a pass of someone who wants the logits
            return None

        def watched(**hook: Any) -> Any:
            self._called = True
            return processor(**hook)

        return args, kwargs | {"output_processor": watched}

    def _check(self, model: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if not self._handed_over:
            return
        if not self._called:
            raise _no_hook(model, "takes, and ignores,")
        for hook in self._hooks:
            hook.remove()


def _no_hook(model: object, what_it_does: str) -> RuntimeError:
    return RuntimeError(
        f"megatron-core {megatron_version}: the forward of {type(model).__name__} {what_it_does} the output_processor "
        f"that log-probabilities are taken by; install megatron-core >= {FIRST_VERSION_WITH_HOOK}, with a model that "
        "calls it"
    )


_CALLS_OF_A_STEP = ("begin_train_step", "train_microbatch", "finish_train_step")


@dataclass(frozen=True)
class _Snapshot:
    generators: list[torch.Tensor]
    tracker: dict[str, torch.Tensor]
    buffers: list[torch.Tensor]


class MegatronTrainBackend:
    """Implements `rank.train_step.TrainStepBackend` for one rank. Its process groups must be initialised.

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
