"""Log-probabilities at several given ids per token under a linear vocabulary head, without storing the logits.

For a student in top-k distillation: log p at the teacher's ids under the full vocabulary, and the mass of all others,
with an exact backward that recomputes the logits tile by tile.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, K ids per token, T = S * B tokens, L of them on
this rank, N those kept by the mask, F statistics per row, P pairs of a token row and an id of this rank's vocabulary,
p of them in a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import VocabShard
from nemo_rl_mcore.ops._head import (
    DEFAULT_OPTIONS,
    GradientTile,
    HeadCall,
    LinearHead,
    Tiling,
    head_gradients,
)
from nemo_rl_mcore.ops._softmax import (
    SplitBackward,
    SplitSoftmax,
    accumulation_dtype,
    empty_statistics,
    gather_over_ranks,
    merge_statistics,
    take_out,
)
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions


@dataclass(frozen=True)
class TilePlaces:
    """Pairs sorted by tile, so that a tile finds its own without comparing every id."""

    pair_P: Tensor
    """Indices into the flattened [N, K]."""
    row_P: Tensor
    column_P: Tensor
    bounds: list[int]
    """Bounds of each tile's pairs, tiles in processing order."""
    tiling: Tiling
    chunks: int

    @classmethod
    def of(cls, id_NK: Tensor, shard: VocabShard, tiling: Tiling) -> TilePlaces:
        """Sort the shard's global ids; the others belong to other ranks."""
        column_NK = id_NK - shard.start
        held_NK = (column_NK >= 0) & (column_NK < shard.valid)
        pair_P = held_NK.reshape(-1).nonzero().squeeze(1)
        row_P, column_P = pair_P // id_NK.shape[1], column_NK.reshape(-1)[pair_P]
        panels, chunks = -(-shard.valid // tiling.cols), -(-id_NK.shape[0] // tiling.rows)
        tile_P, order_P = (column_P // tiling.cols * chunks + row_P // tiling.rows).sort()
        edges = torch.searchsorted(tile_P, torch.arange(panels * chunks + 1, device=id_NK.device))
        bounds = cast("list[int]", edges.tolist())  # pyright: ignore[reportUnknownMemberType]
        return cls(pair_P[order_P], row_P[order_P], column_P[order_P], bounds, tiling, chunks)

    def within(self, panel: slice, rows: slice) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return a tile's pairs, and their (row, column) within it."""
        tile: int = panel.start // self.tiling.cols * self.chunks + rows.start // self.tiling.rows
        span = slice(self.bounds[tile], self.bounds[tile + 1])
        return self.pair_P[span], (self.row_P[span] - rows.start, self.column_P[span] - panel.start)


class IndexedLogprobs(NamedTuple):
    """Results of `linear_logprobs_at`: [S, B, K] under the full vocabulary, in the order of the ids.

    tail_logmass: [S, B] log of all other ids' probability, on request.
    """

    logprobs: Tensor
    tail_logmass: Tensor | None


def linear_logprobs_at(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    indices_SBK: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_tail: bool = False,
    options: LinearLogprobsOptions = DEFAULT_OPTIONS,
) -> IndexedLogprobs:
    """Return the log-probabilities of K ids per token, with an exact backward; 0 where the mask is 0.

    The tail's mass is summed over the other ids, so that its logarithm keeps its digits for any size; without others it
    is the constant -inf. Results are float32 (float64 for float64 inputs). indices_SBK: global ids [S, B, K], distinct
    within a token, the same on every rank. with_tail: also return the tail's mass. All other arguments, and
    ValueErrors, are those of `fused_linear_logprobs`.
    """
    if indices_SBK.dim() == 0 or indices_SBK.shape[-1] == 0 or indices_SBK.is_floating_point():
        raise ValueError(
            f"indices {list(indices_SBK.shape)} of {indices_SBK.dtype} are not ids [S, B, K], K > 0"
        )
    call = HeadCall.of(
        *(hidden_SBH, weight_VH, {"indices without their last dimension": indices_SBK.shape[:-1]}),
        *(tp_group, sequence_parallel, temperature, mask, options),
    )
    hidden_LH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    ids_TK = indices_SBK.reshape(-1, indices_SBK.shape[-1]).long()
    logprob_TK, tail_T = cast("Any", _LinearLogprobsAt).apply(hidden_LH, weight_VH, ids_TK, call, with_tail)
    tail_SB = None if tail_T is None else tail_T.view(call.tokens)
    return IndexedLogprobs(logprob_TK.view(indices_SBK.shape), tail_SB)


class _LinearLogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LH: Tensor, weight_VH: Tensor, ids_TK: Tensor, call: HeadCall, with_tail: bool
    ) -> Any:
        ctx.set_materialize_grads(False)
        shard, ids_NK = call.shard(weight_VH), call.rows.select(ids_TK)
        shard.check_targets(ids_NK, "index")
        sorted_NK = ids_NK.sort(1).values
        repeated = sorted_NK[:, 1:][sorted_NK[:, 1:] == sorted_NK[:, :-1]]
        if repeated.numel() > 0:
            raise ValueError(
                f"index {int(repeated[0])} is given twice for one token: the ids must be distinct"
            )
        head = call.head(call.rows.gather_hidden(hidden_LH), weight_VH)
        places, cache = TilePlaces.of(ids_NK, shard, head.tiling), call.cache(head)
        # This rank's logits at its ids, zero at other ranks' ids, and the statistics of the rest.
        logit_NK = head.hidden_NH.new_zeros(ids_NK.shape, dtype=torch.float64)
        tail_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy=False)
        for tail_FN, panel in zip(tail_KFN, head.panels, strict=True):
            for rows, logits_nv, _ in head.tiles(panel, cache.reserve(panel, head.hidden_NH)):
                pair_p, place = places.within(panel, rows)
                taken_p, tail_FN[:, rows] = take_out(logits_nv, place, head.scale)
                logit_NK.view(-1)[pair_p] = taken_p
        tail_FN = merge_statistics(tail_KFN)
        # One all-gather joins the ranks' parts; each logit is zero on all ranks but one.
        parts_RXN = gather_over_ranks(torch.cat([tail_FN, logit_NK.t()]), call.tp_group)
        count = tail_FN.shape[0]
        logit_NK, tail_FN = parts_RXN[:, count:].sum(0).t(), merge_statistics(parts_RXN[:, :count])
        softmax, dtype = SplitSoftmax.of(logit_NK, tail_FN), accumulation_dtype(hidden_LH.dtype)
        logprob_NK, tail_N = softmax.logprob_NK.to(dtype), softmax.tail_logmass_N.to(dtype)
        ctx.call, ctx.tiling, ctx.cache, ctx.weight = call, head.tiling, cache, weight_VH
        ctx.save_for_backward(hidden_LH, weight_VH, ids_TK, logprob_NK, softmax.tail_lse_N, tail_N)
        tail_T = call.rows.spread(tail_N) if with_tail else None
        if tail_T is not None and ids_NK.shape[1] == shard.vocab_size:
            ctx.mark_non_differentiable(tail_T)
        return call.rows.spread(logprob_NK), tail_T

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator]
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: HeadCall = ctx.call
        hidden_LH, weight_VH, ids_TK, logprob_NK, tail_lse_N, tail_N = ctx.saved_tensors
        # Autograd's gradients cover all tokens, and may be None.
        grad_logprob_NK, grad_tail_N = (
            torch.zeros_like(like_N) if grad_T is None else call.rows.select(grad_T) * call.scale
            for grad_T, like_N in zip(grad_outputs, (logprob_NK, tail_N), strict=True)
        )
        backward = SplitBackward(logprob_NK, tail_lse_N, tail_N, grad_logprob_NK, grad_tail_N)
        live, ids_NK = backward.live_rows(), call.rows.select(ids_TK)
        if live is not None:
            ids_NK, backward = ids_NK[live], backward.at(live)
        (outside, inside_NK), shard = backward.outside_and_inside(), call.shard(weight_VH)
        places, column_NK = TilePlaces.of(ids_NK, shard, ctx.tiling), ids_NK - shard.start

        def tiles(head: LinearHead, panel: slice) -> Iterator[GradientTile]:
            for rows, tile_nv, _ in head.gradient_tiles(panel, outside, ctx.cache.take(panel), live):
                pair_p, place = places.within(panel, rows)
                tile_nv[place] = inside_NK.reshape(-1)[pair_p].to(tile_nv.dtype)
                yield rows, tile_nv, column_NK[rows] - panel.start

        return *head_gradients(ctx, hidden_LH, None, live, tiles), None, None, None
