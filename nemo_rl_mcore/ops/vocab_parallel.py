"""Log-probabilities from existing logits, split over ranks along the vocabulary: the unfused path.

Shapes: V this rank's vocabulary columns, T all tokens (leading dimensions flattened), N those kept by the mask.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import TokenRows, VocabShard
from nemo_rl_mcore.ops._softmax import (
    RowBackward,
    RowSoftmax,
    accumulation_dtype,
    logits_gradient,
    slice_statistics,
)


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    vocab_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities, or (log-probabilities, entropy), in float32 (float64 for float64).

    Each rank's logits get their shard's exact gradient, without a collective in the backward; the incoming gradients
    must be the same on every rank. logits: this rank's [..., V/tp]; targets: global token ids [...]. All other
    arguments, and ValueErrors, are those of `fused_linear_logprobs`.
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
    logits_TV, call = logits.reshape(-1, logits.shape[-1]), (tp_group, 1.0 / temperature, with_entropy)
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
        tp_group, scale, with_entropy = call
        target_N = rows.select(target_T)
        shard.check_targets(target_N)
        logits_NV = rows.select(logits_TV)[:, : shard.valid]
        stats_FN = slice_statistics(logits_NV, target_N - shard.start, with_entropy, scale)
        softmax = RowSoftmax.over_ranks(stats_FN, tp_group, accumulation_dtype(logits_TV.dtype))
        ctx.save_for_backward(logits_TV, target_T, softmax.lse_N, softmax.entropy_N)
        ctx.rows, ctx.shard, ctx.scale = rows, shard, scale
        logprob_T = rows.spread(softmax.logprob_N)
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
        if rows.kept_N is None:
            logits_gradient(logits_NV, target_N, backward, real_TV, ctx.scale)
        else:
            grad_NV = logits_gradient(logits_NV, target_N, backward, torch.empty_like(logits_NV), ctx.scale)
            real_TV.index_copy_(0, rows.kept_N, grad_NV)
        return grad_TV, None, None, None, None
