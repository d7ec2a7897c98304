"""Log-probabilities of given tokens under a linear vocabulary head, without storing the logits.

log p = log softmax(hidden @ weight.T * logit_scale / temperature)[target], with the entropy on request.
The forward keeps one or two floats per token; the backward recomputes the logits tile by tile and is exact.
With a frozen weight the forward keeps the gradient's direction [N, H] instead: scale * (W[target] - sum_v p_v W[v])
does not depend on the loss. Forming it from a tile of logits takes two matrix products, against three in a backward
that recomputes the logits. It needs one pass over the panels, with the sum rescaled whenever the running log-sum-exp
grows.
Under tensor parallelism every rank holds a slice of the vocabulary; results are the same on all ranks.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, T = S * B tokens, L of them on this rank, N those
kept by the mask, n of them in a tile, v columns of a tile, K panels, F floats per row.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._head import (
    DEFAULT_OPTIONS,
    GradientTile,
    HeadCall,
    LinearHead,
    LinearLogprobsOptions,
    Scratch,
    add_product,
    head_gradients,
)
from nemo_rl_mcore.ops._softmax import (
    RowBackward,
    RowSoftmax,
    accumulation_dtype,
    empty_statistics,
    merge_statistics,
    slice_statistics,
)


def fused_linear_logprobs(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    targets_SB: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    options: LinearLogprobsOptions = DEFAULT_OPTIONS,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities [S, B], or (log-probabilities, entropy), with an exact backward.

    Results are float32 (float64 for float64 inputs). Rows where the mask is zero return exactly 0, get no gradient and
    are never multiplied with the weight. The incoming gradients must be the same on every rank.

    hidden_SBH: hidden states [S, B, H], replicated over ranks, with the gradient summed over them; with
    `sequence_parallel` this rank's shard [S/tp, B, H], with the gradient reduce-scattered. weight_VH: this rank's
    vocabulary rows [V/tp, H], in the same dtype. targets_SB: global token ids, and mask: not zero for tokens that
    count; both [S, B] and the same on every rank. tp_group: None for a single rank. temperature: divides the logits,
    inside the softmax. with_entropy: also return the softmax's entropy.

    Raises ValueError for shapes or dtypes that do not match, a temperature of 0 or less, a counted target outside the
    vocabulary, and `accumulate_main_grad` for a weight without `main_grad`.
    """
    call = HeadCall.of(
        *(hidden_SBH, weight_VH, {"targets": targets_SB.shape}),
        *(tp_group, sequence_parallel, temperature, mask, options),
    )
    hidden_LH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    targets_T = targets_SB.reshape(-1)
    out = cast("Any", _FusedLinearLogprobs).apply(hidden_LH, weight_VH, targets_T, call, with_entropy)
    if with_entropy:
        return out[0].view(targets_SB.shape), out[1].view(targets_SB.shape)
    return out.view(targets_SB.shape)


class _FusedLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LH: Tensor, weight_VH: Tensor, target_T: Tensor, call: HeadCall, with_entropy: bool
    ) -> Any:
        ctx.set_materialize_grads(False)
        target_N = call.rows.select(target_T)
        call.shard(weight_VH).check_targets(target_N)
        head = call.head(call.rows.gather_hidden(hidden_LH), weight_VH, target_N)
        # The hidden gradient is then formed here; the entropy's gradient needs the logits again.
        ctx.frozen = call.wanted == (True, False) and not with_entropy
        ctx.call, ctx.tiling, ctx.cache = call, head.tiling, call.cache(head)
        if ctx.frozen:
            logprob_N, direction_NH = _logprobs_and_direction(head, call)
            ctx.save_for_backward(direction_NH)
            return call.rows.spread(logprob_N)
        stats_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy)
        for stats_FN, panel in zip(stats_KFN, head.panels, strict=True):
            for rows, logits_nv, target_n in head.tiles(panel, ctx.cache.reserve(panel, head.hidden_NH)):
                stats_FN[:, rows] = slice_statistics(logits_nv, target_n, with_entropy, head.scale)
        dtype = accumulation_dtype(hidden_LH.dtype)
        softmax = RowSoftmax.over_ranks(merge_statistics(stats_KFN), call.tp_group, dtype)
        # References to the caller's hidden states and weight; gathered rows and logits are recomputed.
        ctx.save_for_backward(hidden_LH, weight_VH, target_T, softmax.lse_N, softmax.entropy_N)
        ctx.weight = weight_VH
        logprob_T = call.rows.spread(softmax.logprob_N)
        return logprob_T if softmax.entropy_N is None else (logprob_T, call.rows.spread(softmax.entropy_N))

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator]
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: HeadCall = ctx.call
        if ctx.frozen:
            (direction_NH,) = ctx.saved_tensors
            grad_N1 = (call.rows.select(grad_outputs[0]) * call.scale).unsqueeze(1)
            grad_NH = (direction_NH * grad_N1).to(direction_NH.dtype)
            return call.rows.reduce_hidden_grad(grad_NH), None, None, None, None
        hidden_LH, _, target_T, lse_N, entropy_N = ctx.saved_tensors
        backward = RowBackward.arriving(call.rows, call.scale, (lse_N, entropy_N), grad_outputs)
        live, target_N = backward.live_rows(), call.rows.select(target_T)
        if live is not None:
            target_N, backward = target_N[live], backward.at(live)

        def tiles(head: LinearHead, panel: slice) -> Iterator[GradientTile]:
            return head.gradient_tiles(panel, backward, ctx.cache.take(panel), live)

        return *head_gradients(ctx, hidden_LH, target_N, live, tiles), None, None, None


def _logprobs_and_direction(head: LinearHead, call: HeadCall) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [N] and this rank's part of W[target] - sum_v p_v W[v], [N, H]."""
    wide = accumulation_dtype(head.hidden_NH.dtype)
    stats_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy=False)
    lse_N = stats_KFN.new_full((head.hidden_NH.shape[0],), float("-inf"))
    mean_NH = torch.zeros_like(head.hidden_NH, dtype=wide)
    scratch = Scratch()
    for stats_FN, panel in zip(stats_KFN, head.panels, strict=True):
        for rows, logits_nv, target_n in head.tiles(panel):
            stats_FN[:, rows] = slice_statistics(logits_nv, target_n, False, head.scale)
            grown_n = torch.logaddexp(lse_N[rows], stats_FN[0, rows])
            # The gradient of -log p for a target outside the tile is the softmax itself.
            as_loss = RowBackward(grown_n, mean_NH.new_full(grown_n.shape, -1.0))
            softmax_nv = head.gradient_tile(logits_nv, torch.full_like(target_n, -1), as_loss)
            mean_NH[rows].mul_(torch.exp(lse_N[rows] - grown_n).to(wide).unsqueeze(1))
            add_product(mean_NH[rows], softmax_nv, head.weight_VH[panel], scratch)
            lse_N[rows] = grown_n
    stats_FN = merge_statistics(stats_KFN)
    softmax = RowSoftmax.over_ranks(stats_FN, call.tp_group, wide)
    share_N = torch.exp(stats_FN[0] - softmax.lse_N)
    direction_NH = mean_NH.mul_(-share_N.to(wide).unsqueeze(1))
    held = ((head.target_N >= 0) & (head.target_N < head.weight_VH.shape[0])).nonzero().squeeze(1)
    target_rows = head.weight_VH.index_select(0, head.target_N[held]).to(wide)
    direction_NH = direction_NH.index_add_(0, held, target_rows).to(head.hidden_NH.dtype)
    return softmax.logprob_N, direction_NH
