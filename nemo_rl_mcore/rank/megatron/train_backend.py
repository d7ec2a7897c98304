"""The train side of the backend: Megatron's model, gradients, optimizer and random state behind the step's protocol."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.config.megatron import LOGITS_CACHE, LOGITS_CHUNK_BYTES, LogitsCache
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch, in_batch_order
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import UnequalCallsError, together
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.auxiliary_losses import (
    AuxiliaryLosses,
    AuxiliaryTerms,
    Output,
    without_prediction_layers,
)
from nemo_rl_mcore.rank.megatron.batching import Batching, attention_inputs
from nemo_rl_mcore.rank.megatron.context_parallel import slices_of_a_sample
from nemo_rl_mcore.rank.megatron.grad_sync import OverlappedGradSync, bucket_groups, start_reductions
from nemo_rl_mcore.rank.megatron.hf_weights.adapters import add_adapters, load_adapters
from nemo_rl_mcore.rank.megatron.hf_weights.load import load_pretrained
from nemo_rl_mcore.rank.megatron.model import build_model, freeze_weights, in_precision, wrap_data_parallel
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, give_value_head, value_head_of
from nemo_rl_mcore.rank.megatron.optimizer_state import build_optimizer
from nemo_rl_mcore.rank.megatron.output_processor import fused_processor, unfused_processor
from nemo_rl_mcore.rank.megatron.passes import Guard, ModelPass, Passes
from nemo_rl_mcore.rank.policy_backend import BackendOptions
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import UnequalChunksError

MicrobatchIterator = Iterator[tuple[Microbatch, AuxiliaryTerms | None]]


@contextmanager
def evaluation_mode(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turn off dropout, gradients and layers that only training needs, inside the block."""
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
    """A rank's model, its passes, microbatches, and the losses that layers attach to their own backward pass."""

    config: TransformerConfig
    chunks: list[MegatronModule]
    passes: Passes
    batching: Batching
    auxiliary: AuxiliaryLosses

    def read(self, data: BatchedDataDict, micro_batch_size: int, kind: ModelPass) -> list[torch.Tensor]:
        """Return a pass's tensors in the batch's order; nothing off the last pipeline stage."""
        microbatches = self.batching.microbatches(data, micro_batch_size, None)
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

    def loss_sums(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int, *, forward_only: bool
    ) -> LocalSums:
        """Return the rank's loss sums (empty off the last stage); gradients are added unless `forward_only`."""
        parts = self._run(
            self.batching.microbatches(data, micro_batch_size, loss_fn.rows_per_sample),
            self.passes.loss(loss_fn),
            trained_by=None if forward_only else loss_fn,
        )
        total = LocalSums()
        for part in parts:
            total.add(part)
        return total

    def _run(
        self, on_cpu: list[Microbatch], kind: ModelPass, *, trained_by: LossFunction | None = None
    ) -> list[Any]:
        """Run microbatches through the schedule: forward only, unless they are trained by a loss."""
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
                # Of the whole rows, which Megatron cuts.
                seq_length=columns * self.config.context_parallel_size,
                micro_batch_size=rows,
                forward_only=trained_by is None,
            )
        finally:
            # Token dispatchers hold the last microbatch's graph by the routers' shares: and so the model, its groups
            # and their threads, where Python's collector cannot see them.
            for layer in (part for chunk in self.chunks for part in chunk.modules()):
                if isinstance(layer, MoELayer):
                    kept = vars(layer.token_dispatcher)
                    graphs = (
                        name for name, value in kept.items() if getattr(value, "grad_fn", None) is not None
                    )
                    kept |= dict.fromkeys(graphs)
        guard.raise_error()  # now that the schedule, in which other ranks take part, has ended
        return parts

    def _forward_step(
        self,
        kind: ModelPass,
        guard: Guard,
        microbatches: MicrobatchIterator,
        model: Any,
        return_schedule_plan: bool = False,
    ) -> Any:
        """Run a microbatch forward, or for the schedule that overlaps expert communication return only its plan."""
        microbatch, terms = next(microbatches)
        activity.advance("a microbatch")
        collect = guard.loss(partial(kind.collect, microbatch))

        def inputs() -> dict[str, Any]:
            mask_BS = microbatch.to_model(kind.wanted(microbatch.rows))
            _, position_ids, _ = causal_inputs(microbatch.rows["input_ids"])
            given = {
                "input_ids": microbatch.input_ids,
                "position_ids": microbatch.to_model(position_ids),
                "output_processor": kind.processor,
                "output_processor_context": kind.context(microbatch, mask_BS),
                **attention_inputs(microbatch, self.config),
            }
            if terms is not None:
                given |= self.auxiliary.model_inputs(terms, microbatch, mask_BS, model)
            return given

        def followed(output: Output) -> Output:
            if terms is not None:
                self.auxiliary.follow(terms, output)
            return output

        def collect_of_plan(*outputs: torch.Tensor) -> Any:
            # A plan has no output before it runs, and its outputs come one by one.
            first, *more = outputs
            return collect(followed(outputs if more else first))

        if return_schedule_plan:
            return model.build_schedule_plan(**inputs()), collect_of_plan
        return guard.forward_step(model, microbatch.input_ids, lambda: (followed(model(**inputs())), collect))


def causal_inputs(input_ids_BL: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return GPTModel's ids and positions from `start` on, and no mask: layers are causal, padding is on the right."""
    rows, length = input_ids_BL.shape
    positions = torch.arange(start, length, device=input_ids_BL.device).expand(rows, -1)
    return input_ids_BL[:, start:], positions, None


_NO_HOOK = (
    f"megatron-core {megatron_version}: the forward of {{}} {{}} the output_processor that log-probabilities are taken "
    "by; install megatron-core >= 0.18.0, with a model that calls it"
)


def require_hook(models: Iterable[LanguageModel]) -> None:
    """Have the first pass of each last stage raise RuntimeError unless it calls the processor that it is given.

    A forward that does not take the keyword is refused at once; both errors name the version to install.
    """
    for model in models:
        try:
            inspect.signature(model.forward).bind_partial(output_processor=None)
        except TypeError as error:
            raise RuntimeError(_NO_HOOK.format(type(model).__name__, "does not take")) from error
        if model.post_process:
            _watch_first_pass(model)


def _watch_first_pass(model: LanguageModel) -> None:
    """Raise after the first pass with a processor that has not called it, or else watch no more."""
    handed_over = called = False

    def hand_over(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal handed_over, called
        processor = kwargs.get("output_processor")
        handed_over, called = processor is not None, False
        if processor is None:  # a pass of someone who wants the logits
            return None

        def watched(**hook: Any) -> Any:
            nonlocal called
            called = True
            return processor(**hook)

        return args, kwargs | {"output_processor": watched}

    def check(model: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if handed_over and not called:
            raise RuntimeError(_NO_HOOK.format(type(model).__name__, "takes, and ignores,"))
        for hook in hooks if handed_over else ():
            hook.remove()

    hooks = (
        model.register_forward_pre_hook(hand_over, with_kwargs=True),
        model.register_forward_hook(check),
    )


_CALLS_OF_A_STEP = ("begin_train_step", "train_microbatch", "finish_train_step")


class MegatronTrainBackend:
    """`TrainStepBackend` for one rank with initialised process groups; without training it has no optimizer."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        self.trained, megatron = options.trained, policy.megatron_cfg
        self.config, models = build_model(policy)
        if policy.model_name is not None:
            with activity.loading(), together("the end of loading the weights"):
                load_pretrained(policy, models)  # before the optimizer takes its fp32 copies
        require_hook(models)
        # What goes by the table of weights comes before parameters that are not in it.
        if options.trained and frozen_of(policy):
            freeze_weights(policy, models)
        if options.role is Role.VALUE:
            for model in models:
                give_value_head(model)
        add_adapters(policy, models, options.seed)
        if (adapter := policy.megatron_cfg.peft.pretrained_adapter) is not None:
            load_adapters(models, policy, Path(adapter))
        modules = in_precision(self.config, models)
        # A model that is not trained has no buffers for gradients. Its `requires_grad` stays: Megatron's linear layers
        # take another way for weights without it, linear_with_frozen_weight (tensor_parallel/layers.py), which rounds
        # otherwise.
        self._wrapped = wrap_data_parallel(policy, self.config, modules) if options.trained else []
        self.chunks: list[MegatronModule] = [*self._wrapped] or [module.eval() for module in modules]
        if options.trained:
            self.optimizer, self.scheduler = build_optimizer(policy, self._wrapped)
        self.overlaps_grad_sync = megatron.distributed_data_parallel_config.overlap_grad_reduce
        self._overlapped = OverlappedGradSync(self.config, self._wrapped)
        # Each rank that shares a sequence has an equal part of it.
        parts = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
        multiple = parts * slices_of_a_sample(megatron.context_parallel_size)
        self.forward = ForwardBackward(
            self.config,
            self.chunks,
            _passes(policy, self.chunks, options),
            Batching(self.config, multiple, policy.token_budgets),
            AuxiliaryLosses(self.config, self.chunks),
        )

    def snapshot(self) -> Any:
        """Return the random generators, which dropout draws from, and the buffers that routers count in."""
        buffers = [buffer.clone() for buffer in self._buffers()]
        return accelerator.device_rng_states(), parallel_groups.rng_tracker().get_states(), buffers

    def restore(self, snapshot: Any) -> None:
        generators, tracker, buffers = snapshot
        accelerator.restore_device_rng_states(generators)
        parallel_groups.rng_tracker().set_states(tracker)
        for buffer, saved in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(saved)

    def _buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for chunk in self._wrapped for buffer in chunk.module.buffers())

    def weights_replaced(self) -> None:
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
        return together(f"the end of {call}", parallel_groups.computing_ranks())

    def zero_grad(self) -> None:
        """Clear all gradients, also those of auxiliary losses, after reductions in flight.

        One that is left would write into cleared gradients, and make the next step skip its own.
        """
        for group in bucket_groups(self._wrapped):
            handle, group.grad_reduce_handle = group.grad_reduce_handle, None
            if handle is not None:
                with suppress(RuntimeError):  # of a lost peer, which the next meeting reports
                    handle.wait()
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forward.auxiliary.reset(self.chunks)

    @contextmanager
    def deferred_grad_sync(self) -> Iterator[None]:
        """Inside, backward passes only add to the local gradient buckets: nothing is reduced, nothing finalised.

        The schedules (pipeline_parallel/schedules.py) would otherwise reduce through `grad_sync_func`, leave `no_sync`
        for each call's last microbatch, and finalise at each call's end. All three functions come back on leaving, also
        after an exception. Enter it after the buckets were zeroed: zeroing resets the flag that `no_sync` clears.
        """
        config = self.config
        saved = config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func
        config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, nullcontext, None
        try:
            with ExitStack() as stack:
                for chunk in self._wrapped:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = saved

    def overlapped_grad_sync(self, factor: float) -> AbstractContextManager[bool]:
        return self._overlapped.begin(factor)

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int
    ) -> LocalSums:
        return self.forward.loss_sums(data, loss_fn, micro_batch_size, forward_only=False)

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
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
        return self._totals(LocalSums.counts(data))

    def _totals(self, sums: LocalSums) -> StepTotals:
        gather = parallel_groups.gather_over_data_parallel_ranks
        totals = sums.reduce(gather) if parallel_groups.is_last_stage() else None
        return parallel_groups.broadcast_from_last_stage(totals)

    def scale_gradients(self, factor: float) -> None:
        for chunk in self._wrapped:
            chunk.scale_gradients(factor)

    def finalize_gradients(self) -> None:
        """Reduce the step's gradients, once, or end the reductions that were started.

        This is more than the data-parallel reduction: layer-norm gradients under sequence parallelism, tied embeddings
        across pipeline stages and router biases are Megatron's to sum here. The gradients are already divided by the
        number of tokens or sequences, so no token count is handed over.
        """
        groups = bucket_groups(self._wrapped)
        start_reductions([group for group in groups if group.ddp_config.overlap_grad_reduce])
        finalize_model_grads([*self._wrapped], num_tokens=None)

    def gradient_norm(self) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def optimizer_step(self, increment: int) -> bool:
        successful, _grad_norm, _zeros = cast("tuple[bool, Any, Any]", self.optimizer.step())
        if successful:
            self.scheduler.step(increment)
        return bool(successful)

    def learning_rate_and_weight_decay(self) -> tuple[float, float]:
        group = self.optimizer.param_groups[0]
        return self.scheduler.get_lr(group), self.scheduler.get_wd(group)


def _passes(policy: PolicyConfig, chunks: list[MegatronModule], options: BackendOptions) -> Passes:
    config, ddp = policy.megatron_cfg, policy.megatron_cfg.distributed_data_parallel_config
    fused = config.use_fused_linear_logprobs
    cache = LOGITS_CACHE if fused else LogitsCache(0)
    linear_options = LinearLogprobsOptions(
        chunk_size=config.fused_linear_logprobs_chunk_size,
        chunk_bytes=LOGITS_CHUNK_BYTES,
        vocab_size=policy.model.vocab_size,
        cache_bytes=cache.limit,
        cache_bytes_per_logit=cache.bytes_per_logit,
        # The output weight's gradient may be summed in its gradient bucket, tile by tile, unless a 16-bit bucket would
        # round every tile's part. Multi-token prediction uses the weight a second time, through autograd, whose
        # gradient the data-parallel hook drops once a weight says that its own is in place.
        accumulate_main_grad=options.trained
        and (ddp.grad_reduce_in_fp32 or policy.precision == "float32")
        and not policy.model.mtp_num_layers,
    )
    return Passes(
        fused_processor(linear_options) if fused else unfused_processor(policy.model.vocab_size),
        temperature=options.temperature,
        linear_options=linear_options,
        value_head=value_head_of(chunks[-1]),
    )
