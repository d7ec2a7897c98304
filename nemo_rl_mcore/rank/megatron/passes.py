"""Kinds of forward pass: the output at each position, and the function that collects it.

`Guard` lets a schedule run to its end after an error on this rank, so that other ranks do not wait forever.

Shapes: S sequence, B rows of a microbatch, K ids per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

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
from nemo_rl_mcore.ops.sampling import SamplingParams
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.model_class import ValueHead
from nemo_rl_mcore.rank.megatron.output_processor import (
    Outputs,
    Processor,
    StudentSelection,
    TokenSelection,
    TopKSelection,
    all_of,
    student_processor,
    topk_processor,
)
from nemo_rl_mcore.rank.megatron.router_replay import Recording
from nemo_rl_mcore.rank.sums import LocalSums

LossTriple = tuple[torch.Tensor, torch.Tensor, Any]
"""Result of a schedule's loss function: the loss, a token count (see `no_tokens`), and our own result."""


@dataclass(frozen=True)
class ModelPass:
    """One kind of pass.

    processor: called by Megatron's hook at the end of the last stage. wanted: returns a mask [B, S] of the microbatch's
    rows, true where the next token's output is needed. context: returns the processor's context, from the microbatch
    and this mask in the model's layout. collect: returns the microbatch's result, from the processor's output.
    recording: takes the routes of the pass, if they are recorded.
    """

    processor: Processor
    wanted: Callable[[BatchedDataDict], torch.Tensor]
    context: Callable[[Microbatch, torch.Tensor], Any]
    collect: Callable[[Microbatch, Outputs], LossTriple]
    recording: Recording | None = None


@dataclass(frozen=True)
class Passes:
    """The passes over one model.

    token_processor: for the batch's own tokens, fused or unfused. sampling: the temperature divides the logits in every
    pass, and the filters apply to the batch's own tokens.
    linear_options: for passes that always use the output weight directly. value_head: on a critic's last stage.
    """

    token_processor: Processor
    sampling: SamplingParams
    linear_options: LinearLogprobsOptions
    value_head: ValueHead | None = None

    def logprobs(self, *, trained_only: bool = False, filtered: bool = True) -> ModelPass:
        """Return the pass for the log-probabilities of all real tokens, or of those in token_mask.

        Each result is a tuple (places, ([B, S],)).
        """
        wanted = partial(next_token_mask, trained_only=trained_only)
        context = partial(self._select_tokens, filtered=filtered)
        return ModelPass(self.token_processor, wanted, context, _collect_of_next_token)

    def values(self) -> ModelPass:
        """Return the pass for the values of the states before all real tokens; each result is (places, ([B, S],))."""
        head = self.value_head

        def process(*, hidden_states: torch.Tensor, context: torch.Tensor, **_unused: Any) -> torch.Tensor:
            """Return values fp32 [S, B], 0 where the context, a mask [S, B], is false; called on the last stage."""
            assert head is not None
            return torch.where(context, head(hidden_states), 0.0)

        # The hidden state that predicts a token is the state before it, so values are shifted like log-probabilities.
        return ModelPass(
            process,
            wanted=next_token_mask,
            context=lambda _microbatch, mask_BS: _by_position(mask_BS),
            collect=_collect_of_next_token,
        )

    def topk(self, k: int, *, trained_only: bool = False) -> ModelPass:
        """Return the pass for the k most probable next tokens.

        Each result is a tuple (places, (logits [B, S, K], ids, logsumexp [B, S], tail [B, S])).
        """

        def collect(microbatch: Microbatch, output: Outputs) -> LossTriple:
            values = tuple(microbatch.from_model(value.transpose(0, 1)) for value in all_of(output))
            return values[0].sum(), no_tokens(values[0]), (microbatch.places, values)

        return ModelPass(
            topk_processor(self.linear_options),
            wanted=partial(next_token_mask, trained_only=trained_only),
            context=lambda _microbatch, mask_BS: TopKSelection(
                k, _by_position(mask_BS), self.sampling.temperature
            ),
            collect=collect,
        )

    def loss(self, loss_fn: LossFunction) -> ModelPass:
        """Return the pass for a loss function's inputs and sums; each result is a `LocalSums`."""

        def select_at_ids(microbatch: Microbatch, mask_BS: torch.Tensor) -> StudentSelection:
            tokens = None
            if loss_fn.needs_tokens:
                tokens = self._select_tokens(
                    microbatch, mask_BS, with_entropy=loss_fn.needs_entropy, filtered=False
                )
            ids_BSK = microbatch.to_model(microbatch.rows["teacher_topk_indices"])
            temperature = self.sampling.temperature
            return StudentSelection(_by_position(ids_BSK), _by_position(mask_BS), temperature, tokens)

        match loss_fn.input_type:
            case LossInputType.LOGPROB:
                context, processor = self._select_tokens, self.token_processor
                given = {"with_entropy": loss_fn.needs_entropy, "with_unfiltered": self.sampling.filters}
                context = partial(context, **given)
            case LossInputType.VALUE:
                critic = self.values()
                context, processor = critic.context, critic.processor
            case LossInputType.DISTILLATION:
                context, processor = select_at_ids, student_processor(self.linear_options)

        def collect(microbatch: Microbatch, output: Outputs) -> LossTriple:
            named = loss_fn.custom_name
            outputs = _loss_outputs(loss_fn.input_type, microbatch, output, self.sampling.filters)
            with nullcontext() if named is None else custom_code(f"{named}.sums"):
                sums = loss_fn.sums(outputs, microbatch.rows)
            return sums.loss, no_tokens(sums.loss), LocalSums.of(sums, microbatch.rows)

        wanted = partial(tokens_to_train, rows_per_sample=loss_fn.rows_per_sample)
        return ModelPass(processor, wanted, context, collect)

    def _select_tokens(
        self, microbatch: Microbatch, mask_BS: torch.Tensor, *, filtered: bool = True, **more: bool
    ) -> TokenSelection:
        places = _by_position(microbatch.to_model(next_tokens(microbatch.rows))), _by_position(mask_BS)
        own = self.sampling
        filters = {"top_k": own.top_k, "top_p": own.top_p} if filtered else {}
        return TokenSelection(*places, temperature=own.temperature, **filters, **more)


def no_tokens(like: torch.Tensor) -> torch.Tensor:
    # The step counts valid tokens itself; with a count given here, forward_step_calc_loss
    # (pipeline_parallel/schedules.py) would divide each schedule call separately.
    return torch.zeros((), dtype=torch.int, device=like.device)


def next_tokens(rows: BatchedDataDict) -> torch.Tensor:
    """Return the next token's id at each position, int64 [B, S]; the last column is undefined."""
    return rows["input_ids"].roll(-1, dims=1)


def next_token_mask(rows: BatchedDataDict, *, trained_only: bool = False) -> torch.Tensor:
    """Return [B, S], true where the next token is real, or with `trained_only` where it is in token_mask."""
    if trained_only:
        return torch.nn.functional.pad(rows["token_mask"].bool()[:, 1:], (0, 1))
    length = rows["input_ids"].shape[1]
    positions = torch.arange(length, device=rows["input_ids"].device)
    return positions < (rows["input_lengths"] - 1).unsqueeze(1)


def tokens_to_train(rows: BatchedDataDict, rows_per_sample: int = 1) -> torch.Tensor:
    """Return [B, S], true where the next token enters the loss; a sample counts if any of its rows does."""
    kept = rows["sample_mask"].bool().view(-1, rows_per_sample).any(dim=1).repeat_interleave(rows_per_sample)
    return next_token_mask(rows, trained_only=True) & kept.unsqueeze(1)


def _by_position(values_BS: torch.Tensor) -> torch.Tensor:
    return values_BS.transpose(0, 1).contiguous()


def _collect_of_next_token(microbatch: Microbatch, output: Outputs) -> LossTriple:
    """Collect [B, S], shifted right by one column: a position's output belongs to the token after it."""
    values_SB = all_of(output)[0]
    shifted_BS = torch.nn.functional.pad(microbatch.from_model(values_SB.transpose(0, 1))[:, :-1], (1, 0))
    return values_SB.sum(), no_tokens(values_SB), (microbatch.places, (shifted_BS,))


def _loss_outputs(
    kind: LossInputType, microbatch: Microbatch, output: Outputs, filtered: bool
) -> TokenOutputs | ValueOutputs | DistillationOutputs:
    of_next_token = [microbatch.from_model(value.transpose(0, 1))[:, :-1] for value in all_of(output)]
    if kind is LossInputType.LOGPROB:
        unfiltered = of_next_token.pop() if filtered else None
        return TokenOutputs(*of_next_token, unfiltered=unfiltered)
    if kind is LossInputType.VALUE:
        return ValueOutputs(torch.nn.functional.pad(of_next_token[0], (1, 0)))
    at_ids, tail, *of_tokens = of_next_token
    data = microbatch.rows
    logprobs = (data["teacher_topk_logits"] - data["teacher_logsumexp"].unsqueeze(-1))[:, :-1]
    teacher_tail = data["teacher_tail_logmass"][:, :-1] if "teacher_tail_logmass" in data else None
    return DistillationOutputs(
        student=TopKLogprobs(at_ids, tail),
        teacher=TopKLogprobs(logprobs, teacher_tail),
        tokens=TokenOutputs(*of_tokens) if of_tokens else None,
    )


Collect = Callable[..., LossTriple]


@dataclass
class Guard:
    """Keeps the first error of a schedule call, to be raised on all ranks after the call.

    A failed loss is replaced by a zero with zero gradients, so that the backward pass runs as on the other ranks. Under
    pipeline parallelism a failed forward step is replaced too: the next stage gets zeros. Two kinds of error still make
    the other ranks wait until the group's timeout: one rank's in layers that span ranks (tensor or expert parallelism),
    and one in a backward pass under pipeline parallelism.
    """

    config: TransformerConfig
    error: Exception | None = None

    def forward_step(
        self, model: Any, ids_BS: torch.Tensor, run: Callable[[], tuple[Any, Collect]]
    ) -> tuple[Any, Collect]:
        """Run a microbatch's forward step, and return its output and loss function; ids_BS: as the model gets them."""
        try:
            return run()
        except Exception as error:
            if self.config.pipeline_model_parallel_size == 1:
                raise
            self.error = self.error or error
        # Zeros [S, B, H] replace this stage's output; their gradient, also zero, flows back.
        model, (rows, columns) = unwrap_model(model), ids_BS.shape
        if self.config.sequence_parallel:
            columns //= self.config.tensor_model_parallel_size
        shape = (1,) if model.post_process else (columns, rows, self.config.hidden_size)
        zeros = torch.zeros(shape, dtype=self.config.pipeline_dtype, device=accelerator.device())
        received = zeros.requires_grad_() if model.pre_process else model.decoder.input_tensor
        return zeros + received.flatten()[:0].sum(), _nothing

    def loss(self, collect: Collect) -> Collect:
        """Return a microbatch's loss function, which returns zero if it or an earlier one fails."""

        def guarded(output: Outputs) -> LossTriple:
            config = self.config
            if self.error is None:
                try:
                    return collect(output)
                except Exception as error:
                    self.error = error
                    if (  # no other rank takes part in this rank's passes
                        config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1
                        and config.expert_model_parallel_size == config.context_parallel_size == 1
                    ):
                        raise
            return _nothing(output)

        return guarded

    def raise_error(self) -> None:
        """Raise the kept error, if any; no frame of its traceback keeps it alive, and with it all activations."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


def _nothing(output: Outputs) -> LossTriple:
    # Sums over empty slices: zeros whose gradients are zero even where a tensor is not finite.
    loss = torch.stack([part.flatten()[:0].sum().float() for part in all_of(output)]).sum()
    return loss, no_tokens(loss), None
