"""Run microbatches through Megatron's schedules: log-probabilities, loss sums, gradients.

Shapes: S sequence, B rows of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config.batching import TokenBudgets
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch, in_batch_order
from nemo_rl_mcore.losses.base import LossFunction, LossType, TokenOutputs
from nemo_rl_mcore.megatron.auxiliary_losses import AuxiliaryLosses, AuxiliaryTerms, without_prediction_layers
from nemo_rl_mcore.megatron.batching import Batching, attention_inputs
from nemo_rl_mcore.megatron.output_processor import Processor, TokenSelection
from nemo_rl_mcore.training.step_sums import LocalSums

# What a schedule's loss function returns: the loss, a token count that Megatron is not to use, and our own result.
LossTriple = tuple[torch.Tensor, torch.Tensor, Any]
Select = Callable[[BatchedDataDict], torch.Tensor]
Collect = Callable[..., LossTriple]
MicrobatchIterator = Iterator[tuple[Microbatch, AuxiliaryTerms | None]]


@contextmanager
def evaluation_mode(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, no dropout, no gradients, no layers that only training needs; all comes back also after an exception."""
    was_training = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad(), without_prediction_layers(modules):
            yield
    finally:
        for module, training in zip(modules, was_training, strict=True):
            module.train(training)


@dataclass(frozen=True)
class ForwardBackward:
    """The model of this rank and how its outputs are taken.

    processor: the output processor, fused or unfused.
    temperature: divides the logits inside the softmax, in training and in log-probabilities alike.
    sequence_multiple: batches are padded to a multiple of this many columns.
    token_budgets: what microbatches are sized by; None for a fixed number of rows.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    processor: Processor
    temperature: float
    sequence_multiple: int
    token_budgets: TokenBudgets | None = None

    @cached_property
    def batching(self) -> Batching:
        """How rows become microbatches."""
        return Batching.of(self.config, self.sequence_multiple, self.token_budgets)

    @cached_property
    def auxiliary(self) -> AuxiliaryLosses:
        """The losses that layers attach to their own backward pass."""
        return AuxiliaryLosses(self.config, self.chunks)

    def logprobs(self, data: BatchedDataDict, micro_batch_size: int) -> torch.Tensor | None:
        """Log-probabilities of `input_ids` [B, S] as fp32 [B, S]; None off the last pipeline stage.

        Column i is log p of token i given those before it; column 0 and the right padding are 0.
        """
        microbatches = self.batching.for_logprobs(data, micro_batch_size)
        with evaluation_mode(self.chunks):
            parts = self._run(microbatches, _real_next_tokens, _collect_logprobs)
        return in_batch_order(parts, *data["input_ids"].shape) if parts else None

    def loss_sums(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int, *, forward_only: bool
    ) -> LocalSums:
        """The loss sums of the rows on this rank (empty off the last pipeline stage).

        Unless `forward_only`, the gradients of the un-normalised loss are added to the local gradient buckets.
        """
        parts = self._run(
            self.batching.for_training(data, micro_batch_size),
            _tokens_to_train,
            partial(_collect_sums, loss_fn),
            trained_by=None if forward_only else loss_fn.loss_type,
            entropy=loss_fn.needs_entropy,
        )
        total = LocalSums()
        for part in parts:
            total.add(part)
        return total

    def _run(
        self,
        on_cpu: list[Microbatch],
        select: Select,
        collect: Collect,
        *,
        trained_by: LossType | None = None,
        entropy: bool = False,
    ) -> list[Any]:
        """Run microbatches through the schedule: forward only, unless they are trained by a loss of some type."""
        terms = [None if trained_by is None else self.auxiliary.terms(part, trained_by) for part in on_cpu]
        microbatches = [microbatch.to(accelerator.device()) for microbatch in on_cpu]
        rows, columns = microbatches[0].model_rows["input_ids"].shape
        iterators: list[Any] = [iter(zip(microbatches, terms, strict=True)) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, select, collect, entropy),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=[*self.chunks] if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=trained_by is None,
        )

    def _forward_step(
        self,
        select: Select,
        collect: Collect,
        entropy: bool,
        microbatches: MicrobatchIterator,
        model: Any,
        return_schedule_plan: bool = False,
    ) -> Any:
        """One microbatch forward; or, for the schedule that overlaps expert communication, only the plan of it."""
        microbatch, terms = next(microbatches)
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(**self._model_inputs(microbatch, terms, select(microbatch.rows), entropy, model))
        if return_schedule_plan:
            return output, partial(self._collect_of_plan, partial(collect, microbatch), terms)
        if terms is not None:
            self.auxiliary.follow(terms, output)
        return output, partial(collect, microbatch)

    def _model_inputs(
        self,
        microbatch: Microbatch,
        terms: AuxiliaryTerms | None,
        next_token_mask_BS: torch.Tensor,
        entropy: bool,
        model: torch.nn.Module,
    ) -> dict[str, Any]:
        model_rows = microbatch.model_rows
        mask_BS = microbatch.to_model(next_token_mask_BS)
        input_ids, position_ids, _ = causal_inputs(model_rows["input_ids"])
        selection = TokenSelection(
            targets_SB=input_ids.roll(-1, dims=1).t().contiguous(),
            mask_SB=mask_BS.t().contiguous(),
            temperature=self.temperature,
            with_entropy=entropy,
        )
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "output_processor": self.processor,
            "output_processor_context": selection,
        }
        inputs |= attention_inputs(microbatch, self.config)
        if terms is not None:
            inputs |= self.auxiliary.model_inputs(terms, model_rows, mask_BS, model)
        return inputs

    def _collect_of_plan(
        self, collect: Collect, terms: AuxiliaryTerms | None, *outputs: torch.Tensor
    ) -> LossTriple:
        """The loss of a plan's outputs: a plan has no output before it runs, and its outputs come one by one."""
        first, *more = outputs
        output = (first, *more) if more else first
        if terms is not None:
            self.auxiliary.follow(terms, output)
        return collect(output)


def _collect_logprobs(microbatch: Microbatch, logprobs_SB: torch.Tensor) -> LossTriple:
    # A position's output belongs to the token after it, so the columns move one to the right.
    shifted_BS = torch.nn.functional.pad(_next_tokens(microbatch, logprobs_SB), (1, 0))
    return logprobs_SB.sum(), no_tokens(logprobs_SB), (microbatch.places, shifted_BS)


def _collect_sums(
    loss_fn: LossFunction,
    microbatch: Microbatch,
    output: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> LossTriple:
    logprobs_SB, entropy_SB = output if isinstance(output, tuple) else (output, None)
    outputs = TokenOutputs(
        logprobs=_next_tokens(microbatch, logprobs_SB),
        entropy=None if entropy_SB is None else _next_tokens(microbatch, entropy_SB),
    )
    sums = loss_fn.sums(outputs, microbatch.rows)
    return sums.loss, no_tokens(logprobs_SB), LocalSums.of(sums, microbatch.rows)


def _next_tokens(microbatch: Microbatch, values_SB: torch.Tensor) -> torch.Tensor:
    """What the model says of each position's next token, one row a sample: [B, S-1]."""
    return microbatch.from_model(values_SB.t())[:, :-1]


def causal_inputs(input_ids_BL: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, None]:
    """GPTModel's input_ids, position_ids and attention mask for the tokens from `start` on.

    No mask is needed: the layers are causal, and rows are padded on the right, so that no token sees the padding.
    """
    rows, length = input_ids_BL.shape
    positions = torch.arange(start, length, device=input_ids_BL.device).expand(rows, -1)
    return input_ids_BL[:, start:], positions, None


def no_tokens(like: torch.Tensor) -> torch.Tensor:
    """The token count of a schedule's loss function: none."""
    # The step counts valid tokens itself; Megatron's own count would divide each schedule call separately.
    return torch.zeros((), dtype=torch.int, device=like.device)


def _real_next_tokens(microbatch: BatchedDataDict) -> torch.Tensor:
    """[B, S], true at each position whose next token is real."""
    length = microbatch["input_ids"].shape[1]
    positions = torch.arange(length, device=microbatch["input_ids"].device)
    return positions < (microbatch["input_lengths"] - 1).unsqueeze(1)


def _tokens_to_train(microbatch: BatchedDataDict) -> torch.Tensor:
    """[B, S], true at each position whose next token enters the loss."""
    mask = microbatch["token_mask"].bool() & microbatch["sample_mask"].bool().unsqueeze(1)
    return torch.nn.functional.pad(mask[:, 1:], (0, 1))
