"""Each token's k largest log-probabilities under a linear vocabulary head, without storing the logits.

A teacher's output in top-k distillation. One pass over the panels keeps the k largest logits so far and sums up all
others, so that the tail's mass is exact.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, K = k ids per token, N tokens kept by the
mask, n x v a tile of logits, F statistics per row, R ranks, M candidates for the k places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._head import DEFAULT_OPTIONS, HeadCall, LinearHead
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


@dataclass(frozen=True)
class TopK:
    """Each token's k largest logits, with terms of the softmax over the whole vocabulary.

    logits: [S, B, K] in descending order, scaled and divided by the temperature; indices: [S, B, K] int64 global ids.
    logsumexp: [S, B]; tail_logmass: [S, B] log of all other ids' probability, -inf without any.
    """

    logits: Tensor
    indices: Tensor
    logsumexp: Tensor
    tail_logmass: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities [S, B, K] under the full vocabulary."""
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
    options: LinearLogprobsOptions = DEFAULT_OPTIONS,
) -> TopK:
    """Return each token's k largest logits with their ids, exact and without gradient; 0 where the mask is 0.

    Ties at the k-th place are broken arbitrarily, but alike on all ranks. Results are float32 (float64 for float64
    inputs). k: 1 to the vocabulary's size; may exceed this rank's rows. All other arguments, and ValueErrors, are those
    of `fused_linear_logprobs`.
    """
    call = HeadCall.of(hidden_SBH, weight_VH, {}, tp_group, sequence_parallel, temperature, mask, options)
    shard = call.shard(weight_VH)
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k is {k}, but must lie between 1 and the vocabulary size {shard.vocab_size}")
    hidden_NH = call.rows.gather_hidden(hidden_SBH.reshape(-1, hidden_SBH.shape[-1]))
    logit_NK, id_NK, tail_FN = _largest(call.head(hidden_NH, weight_VH), k, shard.start)
    # One all-gather; float64 holds ids exactly up to 2**53.
    missing = k - logit_NK.shape[1]  # on a rank with fewer than k ids
    logit_NK = torch.nn.functional.pad(logit_NK, (0, missing), value=float("-inf"))
    id_NK = torch.nn.functional.pad(id_NK.double(), (0, missing), value=-1.0)
    parts_RXN = gather_over_ranks(torch.cat([tail_FN, logit_NK.t(), id_NK.t()]), tp_group)
    count = tail_FN.shape[0]
    logit_MN, id_MN = parts_RXN[:, count : count + k].flatten(0, 1), parts_RXN[:, count + k :].flatten(0, 1)
    tail_FN = merge_statistics(parts_RXN[:, :count])
    logit_NK, id_NK, tail_FN = _largest_among(logit_MN.t(), id_MN.t().long(), tail_FN, k)
    softmax, dtype = SplitSoftmax.of(logit_NK, tail_FN), accumulation_dtype(hidden_SBH.dtype)
    logits, logsumexp, tail_logmass = (
        call.rows.spread(x_N.to(dtype)) for x_N in (logit_NK, softmax.lse_N, softmax.tail_logmass_N)
    )
    shape, indices = (*call.tokens, k), call.rows.spread(id_NK).view(*call.tokens, k)
    return TopK(logits.view(shape), indices, logsumexp.view(call.tokens), tail_logmass.view(call.tokens))


_Largest = tuple[Tensor, Tensor, Tensor]
"""A vocabulary slice's largest logits [N, K] in descending order, their ids, and the statistics of all others."""


def _largest_among(logit_NM: Tensor, id_NM: Tensor, tail_FN: Tensor, k: int) -> _Largest:
    """Keep k of the candidates and add the others to the tail; one rule for tiles and for ranks."""
    sorted_NM, order_NM = logit_NM.sort(1, descending=True)
    tail_FN = add_logits(tail_FN, sorted_NM[:, k:])
    return sorted_NM[:, :k], id_NM.gather(1, order_NM)[:, :k], tail_FN


def _largest(head: LinearHead, k: int, first_id: int) -> _Largest:
    """Return the largest logits of this rank's vocabulary, all of them if it has at most k rows."""
    shape = head.hidden_NH.shape[0], min(k, head.weight_VH.shape[0])
    logit_NK = head.hidden_NH.new_empty(shape, dtype=torch.float64)
    id_NK = head.hidden_NH.new_empty(shape, dtype=torch.int64)
    tail_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy=False)
    for tail_FN, panel in zip(tail_KFN, head.panels, strict=True):
        before, after = min(k, panel.start), min(k, panel.stop)
        for rows, logits_nv, _ in head.tiles(panel):
            column_nK = logits_nv.topk(min(k, logits_nv.shape[1]), dim=1, sorted=False).indices
            row_n1 = torch.arange(logits_nv.shape[0], device=logits_nv.device).unsqueeze(1)
            place = row_n1.expand_as(column_nK), column_nK
            taken_nK, rest_Fn = take_out(logits_nv, place, head.scale)
            logit_nM = torch.cat([logit_NK[rows, :before], taken_nK], 1)
            id_nM = torch.cat([id_NK[rows, :before], column_nK + (first_id + panel.start)], 1)
            logit_NK[rows, :after], id_NK[rows, :after], tail_FN[:, rows] = _largest_among(
                logit_nM, id_nM, rest_Fn, k
            )
    return logit_NK, id_NK, merge_statistics(tail_KFN)
