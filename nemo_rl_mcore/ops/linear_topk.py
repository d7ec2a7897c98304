"""The k largest log-probabilities of each token under a linear vocabulary head, without holding the logits.

What a teacher of top-k distillation hands over. One pass over the panels keeps the k largest logits seen so far
and sums up whatever drops out, so that the mass of the tail is exact.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, K = k ids a token, N tokens kept by the
mask, n x v a tile of logits, F statistics a row, R ranks, M candidates for the k places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._elementwise import SplitSoftmax, add_logits, take_out
from nemo_rl_mcore.ops._head import HeadArguments, HeadCall, LinearHead, plain_logits
from nemo_rl_mcore.ops._softmax import (
    accumulation_dtype,
    empty_statistics,
    gather_over_ranks,
    merge_statistics,
)
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions

_DEFAULT_OPTIONS = LinearLogprobsOptions()


@dataclass(frozen=True)
class TopK:
    """The k largest logits of each token, and the softmax they are part of."""

    logits: Tensor
    """[S, B, K] in descending order, scaled and divided by the temperature."""
    indices: Tensor
    """[S, B, K] int64 global ids."""
    logsumexp: Tensor
    """[S, B] over the whole vocabulary."""
    tail_logmass: Tensor
    """[S, B] log of the probability of all other ids, -inf if there are none."""
    entropy: Tensor | None
    """[S, B] entropy of the whole softmax, if asked for."""

    @property
    def logprobs(self) -> Tensor:
        """Return [S, B, K] log-probabilities under the full vocabulary."""
        return self.logits - self.logsumexp.unsqueeze(-1)


@torch.no_grad()
def linear_topk_logprobs(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    k: int,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    options: LinearLogprobsOptions = _DEFAULT_OPTIONS,
) -> TopK:
    """Return the k largest logits of each token with their ids, exact and without gradient.

    The arguments that `fused_linear_logprobs` has too mean the same here. Rows where the mask is zero give zeros,
    also as ids. Of equal logits at the border of the k any may be returned, and in any order; all ranks return
    the same. The results are float32 (float64 for float64 inputs).

    Args:
        hidden_SBH: hidden states [S, B, H], or with `sequence_parallel` this rank's shard [S/tp, B, H].
        weight_VH: this rank's rows [V/tp, H] of the vocabulary, in the dtype of the hidden states.
        k: how many ids, at most the size of the vocabulary; may exceed this rank's rows.
        tp_group: tensor-parallel group; None means a single rank.
        sequence_parallel: whether `hidden_SBH` is a shard along the sequence.
        temperature: divides the logits, inside the softmax.
        mask: [S, B], not zero where a token counts, the same on every rank.
        with_entropy: also return the entropy of the softmax.
        options: byte budget and other rarely changed settings.

    Raises:
        ValueError: as `fused_linear_logprobs`; a k that is not between 1 and the size of the vocabulary.

    """
    arguments = HeadArguments(tp_group, sequence_parallel, temperature, mask, with_entropy, options)
    call = HeadCall.of(hidden_SBH, weight_VH, arguments)
    shard = call.shard(weight_VH)
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k is {k}, but must lie between 1 and the vocabulary size {shard.vocab_size}")
    hidden_NH = call.rows.gather_hidden(hidden_SBH.reshape(-1, hidden_SBH.shape[-1]))
    largest = _largest_over_ranks(
        _largest(call.head(hidden_NH, weight_VH), k, with_entropy, shard.start), k, tp_group
    )
    softmax = SplitSoftmax.of(largest.logit_NK, largest.tail_FN)

    def result(x_N: Tensor) -> Tensor:
        return call.spread(x_N.to(accumulation_dtype(hidden_SBH.dtype)))

    return TopK(
        logits=result(largest.logit_NK),
        indices=call.spread(largest.id_NK),
        logsumexp=result(softmax.lse_N),
        tail_logmass=result(softmax.tail_logmass_N),
        entropy=None if softmax.entropy_N is None else result(softmax.entropy_N),
    )


@dataclass(frozen=True)
class _Largest:
    """The largest logits of some slice of the vocabulary in descending order, and statistics of its others."""

    logit_NK: Tensor
    id_NK: Tensor
    tail_FN: Tensor

    @classmethod
    def among(cls, logit_NM: Tensor, id_NM: Tensor, tail_FN: Tensor, k: int) -> _Largest:
        """Keep k of the candidates and add the others to the tail. The one rule for tiles and for ranks."""
        sorted_NM, order_NM = logit_NM.sort(1, descending=True)
        tail_FN = add_logits(tail_FN, sorted_NM[:, k:])
        return cls(sorted_NM[:, :k], id_NM.gather(1, order_NM)[:, :k], tail_FN)


def _largest(head: LinearHead, k: int, with_entropy: bool, first_id: int) -> _Largest:
    """Return the largest of this rank's vocabulary, all of it if that is no more than k."""
    shape = head.hidden_NH.shape[0], min(k, head.weight_VH.shape[0])
    logit_NK = head.hidden_NH.new_empty(shape, dtype=torch.float64)
    id_NK = head.hidden_NH.new_empty(shape, dtype=torch.int64)
    tail_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy)
    for tail_FN, panel in zip(tail_KFN, head.panels, strict=True):
        before, after = min(k, panel.start), min(k, panel.stop)
        for rows, logits_nv, _ in head.tiles(panel):
            column_nK = logits_nv.topk(min(k, logits_nv.shape[1]), dim=1, sorted=False).indices
            row_n1 = torch.arange(logits_nv.shape[0], device=logits_nv.device).unsqueeze(1)
            place = row_n1.expand_as(column_nK), column_nK
            taken_nK, rest_Fn = take_out(logits_nv, place, with_entropy, head.scale)
            largest = _Largest.among(
                torch.cat([logit_NK[rows, :before], taken_nK], 1),
                torch.cat([id_NK[rows, :before], column_nK + (first_id + panel.start)], 1),
                rest_Fn,
                k,
            )
            logit_NK[rows, :after], id_NK[rows, :after] = largest.logit_NK, largest.id_NK
            tail_FN[:, rows] = largest.tail_FN
    return _Largest(logit_NK, id_NK, merge_statistics(tail_KFN))


def _largest_over_ranks(own: _Largest, k: int, group: ProcessGroup | None) -> _Largest:
    """Choose among all ranks' largest in one all-gather, in which float64 carries ids exactly up to 2**53."""
    missing = k - own.logit_NK.shape[1]  # on a rank with fewer than k ids
    logit_NK = torch.nn.functional.pad(own.logit_NK, (0, missing), value=float("-inf"))
    id_NK = torch.nn.functional.pad(own.id_NK.double(), (0, missing), value=-1.0)
    parts_RXN = gather_over_ranks(torch.cat([own.tail_FN, logit_NK.t(), id_NK.t()]), group)
    count = own.tail_FN.shape[0]
    logit_MN, id_MN = parts_RXN[:, count : count + k].flatten(0, 1), parts_RXN[:, count + k :].flatten(0, 1)
    tail_FN = merge_statistics(parts_RXN[:, :count])
    return _Largest.among(logit_MN.t(), id_MN.t().long(), tail_FN, k)


def plain_linear_topk_logprobs(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    options: LinearLogprobsOptions = _DEFAULT_OPTIONS,
) -> TopK:
    """Return the plain twin of `linear_topk_logprobs` on a single rank: sort and log_softmax over all the logits."""
    logits_SBV = plain_logits(hidden_SBH, weight_VH, temperature, options)
    sorted_SBV, order_SBV = logits_SBV.sort(-1, descending=True)
    logp_SBV = torch.log_softmax(sorted_SBV, -1)
    dropped_SB = torch.zeros_like(logits_SBV[..., 0], dtype=torch.bool) if mask is None else mask == 0
    return TopK(
        logits=sorted_SBV[..., :k].masked_fill(dropped_SB.unsqueeze(-1), 0.0),
        indices=order_SBV[..., :k].masked_fill(dropped_SB.unsqueeze(-1), 0),
        logsumexp=sorted_SBV.logsumexp(-1).masked_fill(dropped_SB, 0.0),
        tail_logmass=logp_SBV[..., k:].logsumexp(-1).masked_fill(dropped_SB, 0.0),
        entropy=-(logp_SBV.exp() * logp_SBV).sum(-1).masked_fill(dropped_SB, 0.0) if with_entropy else None,
    )
