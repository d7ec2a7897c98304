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

from nemo_rl_mcore.ops._head import HeadArguments, HeadCall, LinearHead
from nemo_rl_mcore.ops._softmax import (
    SplitSoftmax,
    accumulation_dtype,
    add_logits,
    empty_statistics,
    gather_over_ranks,
    merge_statistics,
    take_out,
)
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions

_DEFAULT_OPTIONS = LinearLogprobsOptions()


@dataclass(frozen=True)
class TopK:
    """The k largest logits of each token, and the softmax they are part of.

    logits: [S, B, K] in descending order, scaled and divided by the temperature; indices: [S, B, K] int64 global ids.
    [S, B]: logsumexp and, if asked for, entropy, over the whole vocabulary; tail_logmass, the log of the probability of
    all other ids, -inf if there are none.
    """

    logits: Tensor
    indices: Tensor
    logsumexp: Tensor
    tail_logmass: Tensor
    entropy: Tensor | None

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

    Rows where the mask is zero give zeros,
    also as ids. Of equal logits at the border of the k any may be returned, and in any order; all ranks return
    the same. The results are float32 (float64 for float64 inputs).

    k: how many ids, from 1 to the size of the vocabulary; may exceed this rank's rows. All other arguments, and
    ValueErrors, are those of `fused_linear_logprobs`.
    """
    arguments = HeadArguments(tp_group, sequence_parallel, temperature, mask, with_entropy, options)
    call = HeadCall.of(hidden_SBH, weight_VH, arguments)
    shard = call.shard(weight_VH)
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k is {k}, but must lie between 1 and the vocabulary size {shard.vocab_size}")
    hidden_NH = call.rows.gather_hidden(hidden_SBH.reshape(-1, hidden_SBH.shape[-1]))
    own = _largest(call.head(hidden_NH, weight_VH), k, with_entropy, shard.start)
    # One all-gather, in which float64 carries ids exactly up to 2**53.
    missing = k - own.logit_NK.shape[1]  # on a rank with fewer than k ids
    logit_NK = torch.nn.functional.pad(own.logit_NK, (0, missing), value=float("-inf"))
    id_NK = torch.nn.functional.pad(own.id_NK.double(), (0, missing), value=-1.0)
    parts_RXN = gather_over_ranks(torch.cat([own.tail_FN, logit_NK.t(), id_NK.t()]), tp_group)
    count = own.tail_FN.shape[0]
    logit_MN, id_MN = parts_RXN[:, count : count + k].flatten(0, 1), parts_RXN[:, count + k :].flatten(0, 1)
    tail_FN = merge_statistics(parts_RXN[:, :count])
    largest = _Largest.among(logit_MN.t(), id_MN.t().long(), tail_FN, k)
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
