"""The kinds of pass over a model: what is asked of it at each position, and what becomes of the answer.

Shapes: S sequence, B rows of a microbatch, K ids a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nemo_rl_mcore.config.custom_code import custom_code
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Microbatch
from nemo_rl_mcore.losses.base import (
    DistillationOutputs,
    LossFunction,
    LossInputType,
    TokenOutputs,
    TopKLogprobs,
    ValueOutputs,
)
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.rank.megatron.output_processor import (
    Outputs,
    Processor,
    StudentSelection,
    TokenSelection,
    TopKSelection,
    all_of,
    student_processor,
    topk_processor,
    value_processor,
)
from nemo_rl_mcore.rank.megatron.value_head import ValueHead
from nemo_rl_mcore.rank.sums import LocalSums

# What a schedule's loss function returns: the loss, a token count that Megatron is not to use, and our own result.
LossTriple = tuple[torch.Tensor, torch.Tensor, Any]


@dataclass(frozen=True)
class ModelPass:
    """One kind of pass.

    processor: what Megatron's hook calls at the end of the last stage.
    wanted: [B, S] of a microbatch's rows, true at each position whose next token is of interest.
    context: what the processor gets, from the microbatch and that mask as the model takes the tokens.
    collect: the result of the microbatch, from what the processor returned.
    """

    processor: Processor
    wanted: Callable[[BatchedDataDict], torch.Tensor]
    context: Callable[[Microbatch, torch.Tensor], Any]
    collect: Callable[[Microbatch, Outputs], LossTriple]


@dataclass(frozen=True)
class Passes:
    """The passes over one model.

    token_processor: fused or unfused, for log-probabilities of the batch's own tokens.
    temperature: divides the logits inside the softmax, in every pass alike.
    linear_options: of the passes that always take the output weight itself.
    value_head: the critic's, on a last stage.
    """

    token_processor: Processor
    temperature: float
    linear_options: LinearLogprobsOptions
    value_head: ValueHead | None = None

    def logprobs(self, *, trained_only: bool = False) -> ModelPass:
        """Log-probabilities of all real tokens, or of those that token_mask marks; a result is (places, ([B, S],))."""
        return ModelPass(
            self.token_processor, _of_a_read(trained_only), self._select_tokens, _collect_logprobs
        )

    def values(self) -> ModelPass:
        """Return the values of the states before all real tokens; a result is (places, ([B, S],))."""
        # The hidden state that predicts a token is the state before it, so values shift as log-probabilities do.
        return ModelPass(value_processor(self.value_head), real_next_tokens, _mask, _collect_logprobs)

    def topk(self, k: int, *, trained_only: bool = False) -> ModelPass:
        """Return the k best next tokens: (places, (logits [B, S, K], ids, logsumexp [B, S], tail [B, S]))."""

        def context(_microbatch: Microbatch, mask_BS: torch.Tensor) -> TopKSelection:
            return TopKSelection(k, _by_position(mask_BS), self.temperature)

        processor = topk_processor(self.linear_options)
        return ModelPass(processor, _of_a_read(trained_only), context, _collect_unshifted)

    def loss(self, loss_fn: LossFunction) -> ModelPass:
        """Return what a loss function reads, and its sums; a result is `LocalSums`."""
        match loss_fn.input_type:
            case LossInputType.LOGPROB:
                context = partial(self._select_tokens, with_entropy=loss_fn.needs_entropy)
                processor, read = self.token_processor, _token_outputs
            case LossInputType.VALUE:
                processor, context, read = value_processor(self.value_head), _mask, _value_outputs
            case LossInputType.DISTILLATION:
                context = partial(self._select_at_ids, loss_fn)
                processor, read = student_processor(self.linear_options), _distillation_outputs
        wanted = partial(tokens_to_train, rows_per_sample=loss_fn.rows_per_sample)
        return ModelPass(processor, wanted, context, partial(_collect_sums, loss_fn, read))

    def _select_tokens(
        self, microbatch: Microbatch, mask_BS: torch.Tensor, with_entropy: bool = False
    ) -> TokenSelection:
        targets_BS = microbatch.to_model(next_tokens(microbatch.rows))
        return TokenSelection(_by_position(targets_BS), _by_position(mask_BS), self.temperature, with_entropy)

    def _select_at_ids(
        self, loss_fn: LossFunction, microbatch: Microbatch, mask_BS: torch.Tensor
    ) -> StudentSelection:
        tokens = None
        if loss_fn.needs_tokens:
            tokens = self._select_tokens(microbatch, mask_BS, loss_fn.needs_entropy)
        teacher_ids_BSK = microbatch.to_model(microbatch.rows["teacher_topk_indices"])
        return StudentSelection(
            _by_position(teacher_ids_BSK), _by_position(mask_BS), self.temperature, tokens
        )


def no_tokens(like: torch.Tensor) -> torch.Tensor:
    """Return the token count of a schedule's loss function: none."""
    # The step counts valid tokens itself; by a count of its own forward_step_calc_loss (pipeline_parallel/schedules.py)
    # would have each schedule call divided separately.
    return torch.zeros((), dtype=torch.int, device=like.device)


def next_tokens(rows: BatchedDataDict) -> torch.Tensor:
    """Return the id of each position's next token, int64 [B, S]; without meaning at a row's last column.

    The rows are shifted before a microbatch lays them out, where the next column may be another sample's.
    """
    return rows["input_ids"].roll(-1, dims=1)


def real_next_tokens(rows: BatchedDataDict) -> torch.Tensor:
    """[B, S], true at each position whose next token is real."""
    length = rows["input_ids"].shape[1]
    positions = torch.arange(length, device=rows["input_ids"].device)
    return positions < (rows["input_lengths"] - 1).unsqueeze(1)


def _of_a_read(trained_only: bool) -> Callable[[BatchedDataDict], torch.Tensor]:
    return marked_next_tokens if trained_only else real_next_tokens


def marked_next_tokens(rows: BatchedDataDict) -> torch.Tensor:
    """[B, S], true at each position whose next token token_mask marks, whether or not its row counts."""
    return torch.nn.functional.pad(rows["token_mask"].bool()[:, 1:], (0, 1))


def tokens_to_train(rows: BatchedDataDict, rows_per_sample: int = 1) -> torch.Tensor:
    """[B, S], true at each position whose next token enters the loss.

    A sample counts where any of its rows does: which of them decides is the loss's to say.
    """
    kept = rows["sample_mask"].bool().view(-1, rows_per_sample).any(dim=1).repeat_interleave(rows_per_sample)
    return marked_next_tokens(rows) & kept.unsqueeze(1)


def _by_position(values_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, ...] as Megatron has it: [S, B, ...]."""
    return values_BS.transpose(0, 1).contiguous()


def _mask(_microbatch: Microbatch, mask_BS: torch.Tensor) -> torch.Tensor:
    """Return the context of a processor that needs to know only where it is to answer."""
    return _by_position(mask_BS)


def _rows(microbatch: Microbatch, values_SB: torch.Tensor) -> torch.Tensor:
    """Return what the model says at each position, one row a sample: [B, S, ...]."""
    return microbatch.from_model(values_SB.transpose(0, 1))


def _next_tokens(microbatch: Microbatch, values_SB: torch.Tensor) -> torch.Tensor:
    """Return what the model says of each position's next token: [B, S-1, ...]."""
    return _rows(microbatch, values_SB)[:, :-1]


def _shifted(microbatch: Microbatch, values_SB: torch.Tensor) -> torch.Tensor:
    """[B, S]: a position's output belongs to the token after it, so the columns move one to the right."""
    return torch.nn.functional.pad(_next_tokens(microbatch, values_SB), (1, 0))


def _collect_logprobs(microbatch: Microbatch, output: Outputs) -> LossTriple:
    values_SB = all_of(output)[0]
    return values_SB.sum(), no_tokens(values_SB), (microbatch.places, (_shifted(microbatch, values_SB),))


def _collect_unshifted(microbatch: Microbatch, output: Outputs) -> LossTriple:
    values = tuple(_rows(microbatch, value) for value in all_of(output))
    return values[0].sum(), no_tokens(values[0]), (microbatch.places, values)


def _collect_sums(
    loss_fn: LossFunction, read: Callable[[Microbatch, Outputs], Any], microbatch: Microbatch, output: Outputs
) -> LossTriple:
    outputs, rows = read(microbatch, output), microbatch.rows
    if loss_fn.custom_name is None:
        sums = loss_fn.sums(outputs, rows)
    else:
        with custom_code(f"{loss_fn.custom_name}.sums"):
            sums = loss_fn.sums(outputs, rows)
    return sums.loss, no_tokens(sums.loss), LocalSums.of(sums, microbatch.rows)


def _token_outputs(microbatch: Microbatch, output: Outputs) -> TokenOutputs:
    return TokenOutputs(*(_next_tokens(microbatch, value) for value in all_of(output)))


def _value_outputs(microbatch: Microbatch, output: Outputs) -> ValueOutputs:
    return ValueOutputs(_shifted(microbatch, all_of(output)[0]))


def _distillation_outputs(microbatch: Microbatch, output: Outputs) -> DistillationOutputs:
    at_ids, tail, *of_tokens = (_next_tokens(microbatch, value) for value in all_of(output))
    data = microbatch.rows
    logprobs = data["teacher_topk_logits"] - data["teacher_logsumexp"].unsqueeze(-1)
    teacher_tail = data.get("teacher_tail_logmass")
    return DistillationOutputs(
        student=TopKLogprobs(at_ids, tail),
        teacher=TopKLogprobs(logprobs[:, :-1], None if teacher_tail is None else teacher_tail[:, :-1]),
        tokens=TokenOutputs(*of_tokens) if of_tokens else None,
    )
