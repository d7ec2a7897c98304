"""`TrainStepBackend` on Megatron-Core: the model, its gradients, optimizer and random state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.config.megatron import LOGITS_CACHE, LOGITS_CHUNK_BYTES, LogitsCache
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
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
    without_prediction_layers,
)
from nemo_rl_mcore.rank.megatron.batching import Batching, attention_inputs, column_multiple
from nemo_rl_mcore.rank.megatron.hf_weights.adapters import add_adapters, load_adapters
from nemo_rl_mcore.rank.megatron.hf_weights.load import load_pretrained
from nemo_rl_mcore.rank.megatron.model import build_model, freeze_weights, in_precision, wrap_data_parallel
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, ValueHead, give_value_head, modules_of
from nemo_rl_mcore.rank.megatron.optimizer_state import build_optimizer
from nemo_rl_mcore.rank.megatron.output_processor import fused_logprobs, unfused_processor
from nemo_rl_mcore.rank.megatron.passes import Collect, Guard, ModelPass, Passes
from nemo_rl_mcore.rank.megatron.router_replay import RoutedExperts
from nemo_rl_mcore.rank.policy_backend import BackendOptions
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import UnequalChunksError


def start_reductions(groups: list[Any]) -> None:
    """Start the reductions that no backward hook has started, asynchronously."""
    for group in groups:
        if group.grad_reduce_handle is None:
            group.start_grad_sync()


def bucket_groups(chunks: list[DistributedDataParallel]) -> list[Any]:
    """Return Megatron's bucket groups, each reduced at once: dense weights, then experts, chunk by chunk."""
    return [
        group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


@dataclass
class OverlappedGradSync:
    """Overlaps the reduction of a step's gradients with its last schedule call, after any number of earlier calls.

    order: the bucket groups, in the order in which a backward pass completes them.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    order: list[Any] = field(default_factory=list[Any])
    all_ranks_know: bool = False

    @contextmanager
    def begin(self, factor: float) -> Iterator[bool]:
        """Scale the gradients by `factor` and reduce them during the block's schedule call, if it yields True.

        All ranks enter it. If it yields False, the gradients are left as by `deferred_grad_sync`. A rank whose schedule
        fails still starts its reductions, since other ranks may wait for them; `zero_grad` ends these.
        """
        first_pass = any(group.is_first_batch for group in bucket_groups(self.chunks))
        if not self.all_ranks_know:
            known = torch.tensor(int(bool(self.order) and not first_pass))
            dist.all_reduce(known, op=dist.ReduceOp.MIN, group=parallel_groups.group("all"))
            self.all_ranks_know = bool(known)
        if not self.all_ranks_know:
            with self._learning(first_pass=first_pass):
                yield False
            return
        with _multiplied_by(factor, self.chunks), self._last_microbatch_counts():
            try:
                yield True
            finally:
                start_reductions(self.order)

    @contextmanager
    def _learning(self, *, first_pass: bool) -> Iterator[None]:
        """Record the order in which the last microbatch completes the bucket groups, without reducing them."""
        groups = bucket_groups(self.chunks)
        group_of = {parameter: group for group in groups for parameter in group.params}
        last_come: dict[torch.nn.Parameter, None] = {}

        def note(parameter: torch.nn.Parameter) -> None:
            last_come.pop(parameter, None)
            last_come[parameter] = None

        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in group_of]
        learned = False
        try:
            with self._last_microbatch_counts() if first_pass else nullcontext():
                yield
            counted = (
                len(group.per_param_grad_ready_counts) == len(group.params)
                for group in groups
                if group.is_first_batch
            )
            learned = last_come.keys() == group_of.keys() and all(counted)
        finally:
            for hook in hooks:
                hook.remove()
            if learned:
                self.order = [*dict.fromkeys(group_of[parameter] for parameter in reversed(last_come))][::-1]
            else:
                for group in groups:  # otherwise Megatron would keep these counts for every later pass
                    group.per_param_grad_ready_counts = {}

    @contextmanager
    def _last_microbatch_counts(self) -> Iterator[None]:
        """Let the schedules enable the backward hooks for the last microbatch."""
        held_back = self.config.no_sync_func
        self.config.no_sync_func = lambda: _HeldBack(bucket_groups(self.chunks))
        try:
            yield
        finally:
            self.config.no_sync_func = held_back


@dataclass
class _HeldBack(AbstractContextManager[None]):
    """`DistributedDataParallel.no_sync` as a class instead of a generator.

    The pipelined schedules call `__enter__` and `__exit__` themselves. After an error, a generator would run to its end
    when the traceback is collected, possibly within a later step.
    """

    groups: list[Any]

    def __enter__(self) -> None:
        for group in self.groups:
            group.is_last_microbatch = False

    def __exit__(self, *_error: object) -> None:
        for group in self.groups:
            group.is_last_microbatch = True


@contextmanager
def _multiplied_by(factor: float, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Multiply each bucket by the factor before its reduction, as `scale_gradients` does after the last call."""
    buckets = [bucket for group in bucket_groups(chunks) for bucket in group.buckets]
    own = [bucket.gradient_scaling_factor for bucket in buckets]
    for bucket in buckets:
        bucket.gradient_scaling_factor *= factor
    try:
        yield
    finally:
        for bucket, before in zip(buckets, own, strict=True):
            bucket.gradient_scaling_factor = before


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
    """Runs a rank's model over microbatches.

    auxiliary: the losses that layers add in their own backward pass. routes: None unless routes are replayed.
    """

    config: TransformerConfig
    chunks: list[MegatronModule]
    passes: Passes
    batching: Batching
    auxiliary: AuxiliaryLosses
    routes: RoutedExperts | None = None

    def read(self, data: BatchedDataDict, micro_batch_size: int, kind: ModelPass) -> list[torch.Tensor]:
        """Return a pass's tensors in the batch's order; an empty list before the last pipeline stage."""
        microbatches = self._microbatches(data, micro_batch_size, None)
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
        """Return the rank's loss sums, empty before the last stage, and add gradients unless `forward_only`."""
        parts = self._run(
            self._microbatches(data, micro_batch_size, loss_fn.rows_per_sample),
            self.passes.loss(loss_fn),
            trained_by=None if forward_only else loss_fn,
        )
        total = LocalSums()
        for part in parts:
            total.add(part)
        return total

    def _microbatches(
        self, data: BatchedDataDict, micro_batch_size: int, rows_per_sample: int | None
    ) -> list[Microbatch]:
        routes = self.routes
        data = data.without(ROUTED_EXPERTS) if routes is None else routes.of_own_layers(data)
        return self.batching.microbatches(data, micro_batch_size, rows_per_sample)

    def _run(
        self, on_cpu: list[Microbatch], kind: ModelPass, *, trained_by: LossFunction | None = None
    ) -> list[Any]:
        """Run the microbatches through the schedule; forward only, unless there is a loss to train by."""
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
                # The whole rows' length, which Megatron divides by the ranks.
                seq_length=columns * self.config.context_parallel_size,
                micro_batch_size=rows,
                forward_only=trained_by is None,
            )
        finally:
            if self.routes is not None:
                self.routes.clear()
            # Token dispatchers keep the routers' output, and so the last microbatch's graph, the model, its groups and
            # their threads, where Python's collector cannot see them.
            for layer in modules_of(MoELayer, self.chunks):
                kept = vars(layer.token_dispatcher)
                graphs = (name for name, value in kept.items() if getattr(value, "grad_fn", None) is not None)
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
        """Run a microbatch forward, or return its plan for the schedule that overlaps expert communication."""
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

        follow = partial(self.auxiliary.follow, terms)

        def collect_of_plan(*outputs: torch.Tensor) -> Any:
            # A plan has no output before it runs, and its outputs come one by one.
            first, *more = outputs
            return collect(follow(outputs if more else first))

        if return_schedule_plan:
            return model.build_schedule_plan(**inputs()), collect_of_plan

        def run() -> tuple[Any, Collect]:
            if self.routes is None:
                return follow(model(**inputs())), collect
            routed = self.routes.run(model, microbatch, kind.recording, lambda: model(**inputs()))
            return follow(routed), collect

        return guard.forward_step(model, microbatch.input_ids, run)


def causal_inputs(input_ids_BL: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return GPTModel's ids and positions from `start` on, and no mask: layers are causal, padding is at the end."""
    rows, length = input_ids_BL.shape
    positions = torch.arange(start, length, device=input_ids_BL.device).expand(rows, -1)
    return input_ids_BL[:, start:], positions, None


_NO_HOOK = (
    f"megatron-core {megatron_version}: {{}}.forward {{}} the output_processor, which computes log-probabilities; "
    "install megatron-core >= 0.18.0, with a model that calls it"
)


def require_hook(models: Iterable[LanguageModel]) -> None:
    """Raise RuntimeError if `forward` lacks the keyword or, in a last stage's first pass, ignores it.

    Both errors name the version to install.
    """
    for model in models:
        try:
            inspect.signature(model.forward).bind_partial(output_processor=None)
        except TypeError as error:
            raise RuntimeError(_NO_HOOK.format(type(model).__name__, "does not take")) from error
        if model.post_process:
            _watch_first_pass(model)


def _watch_first_pass(model: LanguageModel) -> None:
    """Register hooks that raise if the first pass with a processor does not call it, and then remove themselves."""
    handed_over = called = False

    def hand_over(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal handed_over, called
        processor = kwargs.get("output_processor")
        handed_over, called = processor is not None, False
        if processor is None:  # a pass that returns logits
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

    hooks = (model.register_forward_pre_hook(hand_over, with_kwargs=True), model.register_forward_hook(check))


_CALLS_OF_A_STEP = ("begin_train_step", "train_microbatch", "finish_train_step")


class MegatronTrainBackend:
    """One rank's model, with initialised process groups; it has an optimizer only if it is trained."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def __init__(self, policy: PolicyConfig, options: BackendOptions):
        self.trained, megatron = options.trained, policy.megatron_cfg
        self.config, models = build_model(policy)
        if policy.model_name is not None:
            with activity.loading(), together("the end of loading the weights"):
                load_pretrained(policy, models)  # before the optimizer takes its fp32 copies
        require_hook(models)
        # Before parameters are added that are not in the family's table of weights.
        if options.trained and frozen_of(policy):
            freeze_weights(policy, models)
        if options.role is Role.VALUE:
            for model in models:
                give_value_head(model)
        add_adapters(policy, models, options.seed)
        if (adapter := policy.megatron_cfg.peft.pretrained_adapter) is not None:
            load_adapters(models, policy, Path(adapter))
        modules = in_precision(self.config, models)
        # A model that is not trained has no gradient buffers. Its weights keep `requires_grad`: without it Megatron's
        # linear layers use linear_with_frozen_weight (tensor_parallel/layers.py), which rounds differently.
        self._wrapped = wrap_data_parallel(policy, self.config, modules) if options.trained else []
        self.chunks: list[MegatronModule] = [*self._wrapped] or [module.eval() for module in modules]
        if options.trained:
            self.optimizer, self.scheduler = build_optimizer(policy, self._wrapped)
        self.overlaps_grad_sync = megatron.distributed_data_parallel_config.overlap_grad_reduce
        self.overlapped_grad_sync = OverlappedGradSync(self.config, self._wrapped).begin
        slices = 2 * megatron.context_parallel_size if megatron.context_parallel_size > 1 else 1
        self.forward = ForwardBackward(
            self.config,
            self.chunks,
            _passes(policy, self.chunks, options),
            Batching(self.config, column_multiple(self.config, slices), slices, policy.token_budgets),
            AuxiliaryLosses(self.config, self.chunks),
            RoutedExperts(policy, self.config, self.chunks) if policy.router_replay.enabled else None,
        )

    def snapshot(self) -> Any:
        """Return copies of the random generators, for dropout, and of the buffers that routers count in."""
        buffers = [buffer.clone() for chunk in self._wrapped for buffer in chunk.module.buffers()]
        return accelerator.device_rng_states(), parallel_groups.rng_tracker().get_states(), buffers

    def restore(self, snapshot: Any) -> None:
        generators, tracker, saved = snapshot
        accelerator.restore_device_rng_states(generators)
        parallel_groups.rng_tracker().set_states(tracker)
        buffers = [buffer for chunk in self._wrapped for buffer in chunk.module.buffers()]
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)

    @contextmanager
    def called_together(self, call: str) -> Iterator[None]:
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
        return together(f"the end of {call}", parallel_groups.group("all"))

    def zero_grad(self) -> None:
        """Clear all gradients, including those of auxiliary losses, once no reduction is in flight.

        A reduction still in flight would write into cleared gradients, and make the next step skip its own reduction.
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
        """Only add to the local gradient buckets inside the block: nothing is reduced, nothing finalised.

        The schedules (pipeline_parallel/schedules.py) would otherwise reduce through `grad_sync_func`, leave `no_sync`
        for each call's last microbatch, and finalise at each call's end. All three functions are restored at the end,
        also after an exception. Enter it with zeroed buckets: zeroing resets the flag that `no_sync` clears.
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

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int
    ) -> LocalSums:
        return self.forward.loss_sums(data, loss_fn, micro_batch_size, forward_only=False)

    def evaluate(self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int) -> StepTotals:
        """Return the loss and metrics of the rows of all ranks, without gradients."""
        with evaluation_mode(self.chunks):
            with self.done_together("an evaluation"):
                sums = self.forward.loss_sums(data, loss_fn, micro_batch_size, forward_only=True)
            return self._totals(sums)

    def reduce(self, sums: LocalSums) -> StepTotals:
        totals = self._totals(sums)
        moe_metrics, mtp_metrics = self.forward.auxiliary.take_metrics()
        return replace(totals, moe_metrics=moe_metrics, mtp_metrics=mtp_metrics)

    def reduce_counts(self, data: BatchedDataDict) -> StepTotals:
        return self._totals(LocalSums.of(None, data))

    def _totals(self, sums: LocalSums) -> StepTotals:
        gather = parallel_groups.gather_over_data_parallel_ranks
        is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        totals = sums.reduce(gather) if is_last_stage else None
        return parallel_groups.broadcast_from_last_stage(totals)

    def scale_gradients(self, factor: float) -> None:
        for chunk in self._wrapped:
            chunk.scale_gradients(factor)

    def finalize_gradients(self) -> None:
        """Reduce the step's gradients, once, or finish the reductions that were started.

        Besides the data-parallel reduction, Megatron sums here layer-norm gradients under sequence parallelism, those
        of embeddings tied across pipeline stages, and router biases. The gradients are already divided by the number
        of tokens or sequences, so no token count is passed on.
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
        # The output weight's gradient may be added to its bucket tile by tile, unless a 16-bit bucket would round each
        # tile's part. Not with multi-token prediction, which uses the weight a second time, through autograd: the
        # data-parallel hook drops that gradient if the weight is marked as already added.
        accumulate_main_grad=options.trained
        and (ddp.grad_reduce_in_fp32 or policy.precision == "float32")
        and not policy.model.mtp_num_layers,
    )
    heads = modules_of(ValueHead, chunks[-1:])
    return Passes(
        partial(fused_logprobs, linear_options) if fused else unfused_processor(policy.model.vocab_size),
        sampling=options.sampling,
        linear_options=linear_options,
        value_head=heads[0] if heads else None,
    )
