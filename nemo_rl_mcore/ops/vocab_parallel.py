"""Log-probabilities from logits that already exist, split over ranks along the vocabulary: the unfused path.

Shapes: V this rank's vocabulary columns, T all tokens (every leading dimension, flattened), N those kept by
the mask.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._elementwise import logits_gradient, slice_statistics
from nemo_rl_mcore.ops._groups import TokenRows, VocabShard
from nemo_rl_mcore.ops._softmax import RowBackward, accumulation_dtype, reduce_over_ranks


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
    """Return the log-probabilities of the targets, or (log-probabilities, entropy), in float32 (float64 for float64).

    Each rank's logits receive the exact gradient of its own shard, so the backward needs no collective; the
    incoming gradients must be the same on every rank.

    Args:
        logits: this rank's logits [..., V/tp].
        targets: global token ids [...], the same on every rank.
        tp_group: tensor-parallel group; None means a single rank.
        temperature: divides the logits, inside the softmax.
        mask: [...], not zero where a token counts; other rows give exactly 0 and receive no gradient.
        with_entropy: also return the entropy of the softmax.
        vocab_size: real size of the global vocabulary; padded columns beyond it are left out.

    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive, a counted target outside the
            vocabulary.

    """
    if logits.shape[:-1] != targets.shape or (mask is not None and mask.shape != targets.shape):
        shapes = [list(x.shape) for x in (logits, targets, mask) if x is not None]
        raise ValueError(
            f"logits, targets and mask must agree in all but the last dimension of the logits: {shapes}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    call = _Call(
        TokenRows.of(mask, targets.numel()),
        VocabShard.of(logits.shape[-1], vocab_size, tp_group),
        tp_group,
        1.0 / temperature,
        with_entropy,
    )
    logits_TV = logits.reshape(-1, logits.shape[-1])
    out = cast("Any", _VocabParallelLogprobs).apply(logits_TV, targets.reshape(-1), call)
    if with_entropy:
        return out[0].view(targets.shape), out[1].view(targets.shape)
    return out.view(targets.shape)


@dataclass(frozen=True)
class _Call:
    """What forward and backward share besides the tensors of the graph."""

    rows: TokenRows
    shard: VocabShard
    tp_group: ProcessGroup | None
    scale: float
    with_entropy: bool

    def logits(self, logits_TV: Tensor) -> Tensor:
        """Return the kept rows and real columns [N, valid]."""
        return self.rows.select(logits_TV)[:, : self.shard.valid]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, call: _Call) -> Any:
        ctx.set_materialize_grads(False)
        target_N = call.rows.select(target_T)
        call.shard.check_targets(target_N)
        stats_FN = slice_statistics(
            call.logits(logits_TV), target_N - call.shard.start, call.with_entropy, call.scale
        )
        softmax = reduce_over_ranks(stats_FN, call.tp_group, accumulation_dtype(logits_TV.dtype))
        ctx.save_for_backward(logits_TV, target_T, softmax.lse_N, softmax.entropy_N)
        ctx.call = call
        logprob_T = call.rows.spread(softmax.logprob_N)
        return logprob_T if softmax.entropy_N is None else (logprob_T, call.rows.spread(softmax.entropy_N))

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator]
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_TV, target_T, lse_N, entropy_N = ctx.saved_tensors
        call: _Call = ctx.call
        backward = RowBackward.arriving(call.rows, call.scale, (lse_N, entropy_N), grad_outputs)
        target_N = call.rows.select(target_T) - call.shard.start
        grad_TV = torch.zeros_like(logits_TV)
        logits_NV = call.logits(logits_TV)
        if call.rows.kept_N is None:
            logits_gradient(logits_NV, target_N, backward, grad_TV[:, : call.shard.valid], call.scale)
        else:
            grad_NV = logits_gradient(logits_NV, target_N, backward, torch.empty_like(logits_NV), call.scale)
            grad_TV[:, : call.shard.valid].index_copy_(0, call.rows.kept_N, grad_NV)
        return grad_TV, None, None
