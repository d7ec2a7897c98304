"""Run microbatches through Megatron's schedules: log-probabilities, loss sums, gradients.

Shapes: S sequence, B rows of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch, in_batch_order
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.megatron.auxiliary_losses import (
    AuxiliaryLosses,
    AuxiliaryTerms,
    without_prediction_layers,
)
from nemo_rl_mcore.rank.megatron.batching import Batching, attention_inputs
from nemo_rl_mcore.rank.megatron.guard import Collect, Guard
from nemo_rl_mcore.rank.megatron.passes import LossTriple, ModelPass, Passes
from nemo_rl_mcore.rank.sums import LocalSums

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
