"""Log-probabilities from existing logits, split over ranks along the vocabulary: the unfused path.

Shapes: V this rank's vocabulary columns, T all tokens (leading dimensions flattened), N those kept by the mask.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import TokenRows, VocabShard, all_gather_rows, group_size
from nemo_rl_mcore.ops._softmax import (
    NEGLIGIBLE,
    RowBackward,
    RowSoftmax,
    accumulation_dtype,
    empty_statistics,
    logits_gradient,
    row_blocks,
    slice_statistics,
)
from nemo_rl_mcore.ops.sampling import LeastToken, SamplingParams


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities, or (log-probabilities, entropy), in float32 (float64 for float64).

    Each rank's logits get their shard's exact gradient, without a collective in the backward; the incoming gradients
    must be the same on every rank. logits: this rank's [..., V/tp]; targets: global token ids [...]. top_k, top_p: the
    softmax is over the tokens that `LeastToken` keeps; a target outside has -inf, and the caller gives it no gradient.
    All other arguments, and ValueErrors, are those of `fused_linear_logprobs`.
    """
    if logits.shape[:-1] != targets.shape or (mask is not None and mask.shape != targets.shape):
        shapes = [list(x.shape) for x in (logits, targets, mask) if x is not None]
        raise ValueError(
            f"logits, targets and mask must agree in all but the last dimension of the logits: {shapes}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    rows = TokenRows.of(mask, targets.numel())
    shard = VocabShard.of(logits.shape[-1], vocab_size, tp_group)
    sampling = SamplingParams(temperature, top_k, top_p)
    logits_TV, call = logits.reshape(-1, logits.shape[-1]), (tp_group, sampling, with_entropy)
    out = cast("Any", _VocabParallelLogprobs).apply(logits_TV, targets.reshape(-1), rows, shard, call)
    if with_entropy:
        return out[0].view(targets.shape), out[1].view(targets.shape)
    return out.view(targets.shape)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, target_T: Tensor, rows: TokenRows, shard: VocabShard, call: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        tp_group, sampling, with_entropy = call
        target_N, scale = rows.select(target_T), 1.0 / sampling.temperature
        shard.check_targets(target_N)
        logits_NV = rows.select(logits_TV)
        least = _least_token(logits_NV, shard, sampling, tp_group) if sampling.filters else None
        (stats_FN,) = empty_statistics(1, logits_NV, with_entropy)
        for block, kept_nV, empty_n in _kept_logits(logits_NV[:, : shard.valid], least, shard.start):
            stats_FN[:, block] = slice_statistics(kept_nV, target_N[block] - shard.start, with_entropy, scale)
            if empty_n is not None:
                stats_FN[:1, block].masked_fill_(empty_n, -torch.inf)
                stats_FN[2:, block].masked_fill_(empty_n, 0.0)
        softmax = RowSoftmax.over_ranks(stats_FN, tp_group, accumulation_dtype(logits_TV.dtype))
        ctx.save_for_backward(logits_TV, target_T, softmax.lse_N, softmax.entropy_N)
        ctx.rows, ctx.shard, ctx.scale, ctx.least = rows, shard, scale, least
        logprob_N = softmax.logprob_N
        if least is not None:
            logprob_N = logprob_N.masked_fill(logprob_N < NEGLIGIBLE * scale / 2, -torch.inf)
        logprob_T = rows.spread(logprob_N)
        return logprob_T if softmax.entropy_N is None else (logprob_T, rows.spread(softmax.entropy_N))

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator]
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_TV, target_T, lse_N, entropy_N = ctx.saved_tensors
        rows: TokenRows = ctx.rows
        backward = RowBackward.arriving(rows, ctx.scale, (lse_N, entropy_N), grad_outputs)
        target_N = rows.select(target_T) - ctx.shard.start
        grad_TV = torch.zeros_like(logits_TV)
        real_TV = grad_TV[:, : ctx.shard.valid]
        logits_NV = rows.select(logits_TV)[:, : ctx.shard.valid]
        grad_NV = real_TV if rows.kept_N is None else torch.empty_like(logits_NV)
        for block, kept_nV, _ in _kept_logits(logits_NV, ctx.least, ctx.shard.start):
            logits_gradient(kept_nV, target_N[block], backward.at(block), grad_NV[block], ctx.scale)
        if rows.kept_N is not None:
            real_TV.index_copy_(0, rows.kept_N, grad_NV)
        return grad_TV, None, None, None, None


def _kept_logits(
    logits_NV: Tensor, least: LeastToken | None, first_id: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield blocks of rows: their place, their logits, and a mask [n] of rows in which this slice keeps no token.

    Logits outside the filters are replaced by one that adds nothing to a sum of real ones, in a copy of the block.
    """
    if least is None:
        yield slice(None), logits_NV, None
        return
    for block in row_blocks(logits_NV):
        outside_nV = least.at(block).excludes(logits_NV[block], first_id)
        yield block, logits_NV[block].masked_fill(outside_nV, NEGLIGIBLE), outside_nV.all(1)


def _least_token(
    logits_NV: Tensor, shard: VocabShard, sampling: SamplingParams, group: ProcessGroup | None
) -> LeastToken:
    """Return the rows' least tokens, the same on all ranks; each rank sorts a share of every block of rows."""
    ranks, found = group_size(group), [logits_NV.new_empty(0, 2, dtype=torch.float64)]
    for block in row_blocks(logits_NV):  # of all columns, which are equally many on all ranks
        logits_nV = logits_NV[block]
        count, width = logits_nV.shape
        if ranks > 1:
            sent_nV = torch.nn.functional.pad(logits_nV, (0, 0, 0, -count % ranks))
            received_nV = torch.empty_like(sent_nV)
            dist.all_to_all_single(received_nV, sent_nV, group=group)  # pyright: ignore[reportUnknownMemberType]
            # Every rank's columns of this rank's rows, side by side.
            logits_nV = received_nV.view(ranks, -1, width).transpose(0, 1).flatten(1)
        least = LeastToken.of(logits_nV[:, : shard.vocab_size], sampling)
        both_n2 = torch.cat([least.logit_N1.double(), least.id_N1.double()], dim=1)
        found.append(all_gather_rows(both_n2, group)[:count] if group is not None else both_n2)
    both_N2 = torch.cat(found)
    return LeastToken(both_N2[:, :1].to(logits_NV.dtype), both_N2[:, 1:].long())
