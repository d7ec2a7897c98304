"""Log-probabilities of selected tokens, computed from decoder hidden states in Megatron's own hook.

`GPTModel.forward(..., output_processor=, output_processor_context=)` (megatron-core 0.18 and later) calls the processor
on the last pipeline stage in place of the output layer and the loss; `require_hook` checks this.

Shapes: S sequence, B batch, H hidden, V vocabulary; under sequence parallelism the hidden states are [S/tp, B, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nemo_rl_mcore.ops._groups import TokenRows
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at
from nemo_rl_mcore.ops.linear_topk import linear_topk_logprobs
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs
from nemo_rl_mcore.rank.megatron import parallel_groups


@dataclass(frozen=True)
class TokenSelection:
    """Tokens whose log-probabilities to return: next ids int64 [S, B], 0 where the bool mask [S, B] is false.

    top_k, top_p: filters, only of the unfused head. with_unfiltered: return unfiltered log-probabilities last.
    """

    targets_SB: torch.Tensor
    mask_SB: torch.Tensor
    temperature: float = 1.0
    with_entropy: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    with_unfiltered: bool = False


@dataclass(frozen=True)
class TopKSelection:
    """Number of most probable next tokens to return at each position of the mask [S, B]."""

    k: int
    mask_SB: torch.Tensor
    temperature: float = 1.0


@dataclass(frozen=True)
class StudentSelection:
    """Ids [S, B, K] at which a student is compared with a teacher, and the batch's own tokens, if they are needed."""

    ids_SBK: torch.Tensor
    mask_SB: torch.Tensor
    temperature: float = 1.0
    tokens: TokenSelection | None = None


# The types of output that Float16Module converts.
Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Processor = Callable[..., Outputs]


def all_of(output: Outputs) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def unfused_processor(vocab_size: int) -> Processor:
    """Return a processor that computes log-probabilities from the output layer's logits at the selected positions."""

    def process(
        *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, context: TokenSelection,
        scale_logits: Callable[[torch.Tensor], torch.Tensor], **_unused: Any,
    ) -> Outputs:  # fmt: skip
        def logprobs(hidden: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None) -> Outputs:
            logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=False)
            selected = partial(
                vocab_parallel_logprobs,
                scale_logits(logits),
                targets,
                tp_group=parallel_groups.group("tensor"),
                temperature=context.temperature,
                mask=mask,
                vocab_size=vocab_size,
            )
            found = selected(with_entropy=context.with_entropy, top_k=context.top_k, top_p=context.top_p)
            return (*all_of(found), *all_of(selected())) if context.with_unfiltered else found

        whole = hidden_states, context.targets_SB, context.mask_SB
        if output_layer.sequence_parallel:
            return logprobs(*whole)
        rows = TokenRows.of(context.mask_SB, context.mask_SB.numel())
        if rows.count in (0, rows.total):
            return logprobs(*whole)
        hidden_N1H = rows.select(hidden_states.flatten(0, 1)).unsqueeze(1)
        found = logprobs(hidden_N1H, rows.select(context.targets_SB.flatten()).unsqueeze(1), None)
        spread = [rows.spread(one.squeeze(1)).view_as(context.targets_SB) for one in all_of(found)]
        return tuple(spread) if isinstance(found, tuple) else spread[0]

    return process


def fused_logprobs(
    options: LinearLogprobsOptions, *, hidden_states: torch.Tensor, context: TokenSelection, **hook: Any
) -> Outputs:
    """Return the selected log-probabilities without [S, B, V] logits; a processor, once `options` are bound."""
    weight, arguments = _head(options, context, **hook)
    return fused_linear_logprobs(
        hidden_states, weight, context.targets_SB, with_entropy=context.with_entropy, **arguments
    )


def student_processor(options: LinearLogprobsOptions) -> Processor:
    """Return a student's processor: log-probabilities [S, B, K], log tail mass [S, B], then those of `tokens`."""

    def process(
        *, hidden_states: torch.Tensor, context: StudentSelection, **hook: Any
    ) -> tuple[torch.Tensor, ...]:
        weight, arguments = _head(options, context, **hook)
        at_ids = linear_logprobs_at(hidden_states, weight, context.ids_SBK, with_tail=True, **arguments)
        assert at_ids.tail_logmass is not None
        if context.tokens is None:
            return at_ids.logprobs, at_ids.tail_logmass
        # The logits at the ids occupy the cache.
        uncached = replace(options, cache_bytes=0)
        of_tokens = fused_logprobs(uncached, hidden_states=hidden_states, context=context.tokens, **hook)
        return at_ids.logprobs, at_ids.tail_logmass, *all_of(of_tokens)

    return process


def topk_processor(options: LinearLogprobsOptions) -> Processor:
    """Return a teacher's processor: logits and ids [S, B, K], logsumexp over all ids and log tail mass [S, B]."""

    def process(
        *, hidden_states: torch.Tensor, context: TopKSelection, **hook: Any
    ) -> tuple[torch.Tensor, ...]:
        weight, arguments = _head(options, context, **hook)
        best = linear_topk_logprobs(hidden_states, weight, context.k, **arguments)
        return best.logits, best.indices, best.logsumexp, best.tail_logmass

    return process


def _head(
    options: LinearLogprobsOptions, selection: TokenSelection | TopKSelection | StudentSelection, *,
    output_layer: Any, output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor], **_unused: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:  # fmt: skip
    """Return this rank's rows of the output weight, and the common arguments of all functions that use them."""
    # With tied embeddings the output layer owns no weight; the model passes the shared one.
    weight = output_layer.weight if output_weight is None else output_weight
    # MuP's scaling of the logits is a multiplication, so its value at one is the factor.
    scaled = replace(options, logit_scale=float(scale_logits(torch.ones(()))))
    return weight, {
        "tp_group": parallel_groups.group("tensor"),
        "sequence_parallel": output_layer.sequence_parallel,
        "temperature": selection.temperature,
        "mask": selection.mask_SB,
        "options": scaled,
    }
