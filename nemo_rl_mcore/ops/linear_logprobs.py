"""Log-probabilities of given tokens under a linear vocabulary head, without ever holding the logits.

log p = log softmax(hidden @ weight.T * logit_scale / temperature)[target], with the entropy if asked for.
The forward keeps one or two floats a token; the backward recomputes the logits tile by tile and is exact.
With a frozen weight the forward keeps the gradient's direction [N, H] instead (see `_frozen_head`).
Under tensor parallelism every rank holds a slice of the vocabulary; results are the same on all ranks.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, T = S * B tokens, L of them held by this
rank, N those kept by the mask.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._frozen_head import frozen_head_statistics, logprob_direction
from nemo_rl_mcore.ops._groups import VocabShard, group_size
from nemo_rl_mcore.ops._head_tiles import (
    LinearHead,
    LogitsCache,
    Tiling,
    head_gradients,
    head_statistics,
    tiling_for,
)
from nemo_rl_mcore.ops._softmax import RowBackward, accumulation_dtype, reduce_over_ranks
from nemo_rl_mcore.ops._token_rows import TokenRows
from nemo_rl_mcore.ops._weight_gradient import AutogradWeightGradient, MainGradAccumulation, WeightGradient


@dataclass(frozen=True)
class LinearLogprobsOptions:
    """Rarely changed settings of `fused_linear_logprobs`."""

    chunk_bytes: int = 64 << 20
    """Working memory of one tile of logits, in bytes; the tile's rows and columns follow from it."""
    chunk_size: int | None = None
    """Token rows per chunk, each against the rank's whole vocabulary; overrides the byte budget."""
    vocab_size: int | None = None
    """Real size of the global vocabulary; padded rows beyond it stay out of the softmax. None: no padding."""
    logit_scale: float = 1.0
    """Factor on the logits (MuP), applied with the temperature."""
    cache_bytes: int = 0
    """Logits that the forward may keep for the backward, in bytes; what fits is not computed twice."""
    accumulate_main_grad: bool = False
    """Add the weight's gradient to its `main_grad`, as Megatron's gradient_accumulation_fusion does, and set
    `grad_added_to_main_grad` for the data-parallel hook."""

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or (self.chunk_size is not None and self.chunk_size <= 0):
            raise ValueError(f"chunk_bytes and chunk_size must be positive: {self}")
        if self.cache_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative: {self}")


_DEFAULT_OPTIONS = LinearLogprobsOptions()


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
    options: LinearLogprobsOptions = _DEFAULT_OPTIONS,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities [S, B] of the targets, or (log-probabilities, entropy), with an exact backward.

    Results are float32 (float64 for float64 inputs). Rows where the mask is zero give exactly 0, receive no
    gradient and are never multiplied with the weight. The incoming gradients must be the same on every rank.

    Args:
        hidden_SBH: hidden states [S, B, H], replicated over ranks, their gradient summed over them; with
            `sequence_parallel` this rank's shard [S/tp, B, H], whose gradient is reduce-scattered.
        weight_VH: this rank's rows [V/tp, H] of the vocabulary, in the dtype of the hidden states.
        targets_SB: global token ids [S, B], the same on every rank.
        tp_group: tensor-parallel group; None means a single rank.
        sequence_parallel: whether `hidden_SBH` is a shard along the sequence.
        temperature: divides the logits, inside the softmax.
        mask: [S, B], not zero where a token counts, the same on every rank.
        with_entropy: also return the entropy of the softmax.
        options: byte budget and other rarely changed settings.

    Raises:
        ValueError: shapes or dtypes that do not fit, a temperature that is not positive, a counted target
            outside the vocabulary, `accumulate_main_grad` for a weight without `main_grad`.

    """
    shards = group_size(tp_group) if sequence_parallel else 1
    _check_shapes(hidden_SBH, weight_VH, targets_SB, mask, shards)
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    rows = TokenRows.of(mask, targets_SB.numel(), tp_group, sequence_parallel)
    # Inside an autograd function gradients are always off, so whether there will be a backward is asked here.
    trains = torch.is_grad_enabled()
    wanted = trains and hidden_SBH.requires_grad, trains and weight_VH.requires_grad
    if wanted[1] and options.accumulate_main_grad and not hasattr(weight_VH, "main_grad"):
        raise ValueError("accumulate_main_grad needs a weight with main_grad, a parameter of Megatron's DDP")
    call = _Call(rows, tp_group, options.logit_scale / temperature, with_entropy, options, wanted)
    hidden_LH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    out = cast("Any", _FusedLinearLogprobs).apply(hidden_LH, weight_VH, targets_SB.reshape(-1), call)
    if with_entropy:
        return out[0].view(targets_SB.shape), out[1].view(targets_SB.shape)
    return out.view(targets_SB.shape)


@dataclass(frozen=True)
class _Call:
    """What forward and backward share besides the tensors of the graph."""

    rows: TokenRows
    tp_group: ProcessGroup | None
    scale: float
    with_entropy: bool
    options: LinearLogprobsOptions
    wanted: tuple[bool, bool]
    """Whether gradients of the hidden states and of the weight are wanted."""

    @property
    def frozen(self) -> bool:
        """Whether the forward forms the hidden gradient; one through the entropy needs the logits again."""
        return self.wanted == (True, False) and not self.with_entropy

    def shard(self, weight_VH: Tensor) -> VocabShard:
        """The part of the vocabulary that the weight holds."""
        return VocabShard.of(weight_VH.shape[0], self.options.vocab_size, self.tp_group)

    def head(
        self, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, tiling: Tiling | None = None
    ) -> LinearHead:
        """The head over this rank's real vocabulary rows, for the given token rows with global target ids."""
        shard = self.shard(weight_VH)
        if tiling is None:
            options = self.options
            tiling = tiling_for(hidden_NH, shard.valid, options.chunk_bytes, options.chunk_size)
        return LinearHead(hidden_NH, weight_VH[: shard.valid], target_N - shard.start, self.scale, tiling)

    def weight_gradient(self, weight_VH: Tensor, chunks: int) -> WeightGradient:
        """Where the weight's gradient goes."""
        if self.options.accumulate_main_grad:
            return MainGradAccumulation(weight_VH)
        return AutogradWeightGradient(weight_VH, chunks)


class _FusedLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LH: Tensor, weight_VH: Tensor, target_T: Tensor, call: _Call) -> Any:
        ctx.set_materialize_grads(False)
        target_N = call.rows.select(target_T)
        call.shard(weight_VH).check_targets(target_N)
        head = call.head(call.rows.gather_hidden(hidden_LH), weight_VH, target_N)
        dtype = accumulation_dtype(hidden_LH.dtype)
        ctx.call, ctx.tiling, ctx.cache = call, head.tiling, LogitsCache(call.options.cache_bytes)
        if call.frozen:
            stats_FN, mean_NH = frozen_head_statistics(head)
            softmax = reduce_over_ranks(stats_FN, call.tp_group, dtype)
            share_N = torch.exp(stats_FN[0] - softmax.lse_N)
            ctx.save_for_backward(logprob_direction(head, mean_NH, share_N))
            return call.rows.spread(softmax.logprob_N)
        cache = ctx.cache if any(call.wanted) else LogitsCache(0)
        softmax = reduce_over_ranks(head_statistics(head, call.with_entropy, cache), call.tp_group, dtype)
        # The caller's hidden states and weight by reference; the gathered rows and the logits are recomputed.
        ctx.save_for_backward(hidden_LH, weight_VH, target_T, softmax.lse_N, softmax.entropy_N)
        ctx.weight = weight_VH  # the parameter itself: what saved tensors give back may lack its main_grad
        logprob_T = call.rows.spread(softmax.logprob_N)
        return logprob_T if softmax.entropy_N is None else (logprob_T, call.rows.spread(softmax.entropy_N))

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator]
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: _Call = ctx.call
        if call.frozen:
            (direction_NH,) = ctx.saved_tensors
            grad_N1 = (call.rows.select(grad_outputs[0]) * call.scale).unsqueeze(1)
            grad_NH = (direction_NH * grad_N1).to(direction_NH.dtype)
            return call.rows.reduce_hidden_grad(grad_NH), None, None, None
        hidden_LH, weight_VH, target_T, lse_N, entropy_N = ctx.saved_tensors
        backward = RowBackward.arriving(call.rows, call.scale, (lse_N, entropy_N), grad_outputs)
        # Collectives move the same rows as in the forward; only the products leave out rows without gradient.
        hidden_NH, target_N = call.rows.gather_hidden(hidden_LH), call.rows.select(target_T)
        live = backward.live_rows()
        if live is not None:
            hidden_NH, target_N, backward = hidden_NH[live], target_N[live], backward.at(live)
        head = call.head(hidden_NH, weight_VH, target_N, ctx.tiling)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        sink = call.weight_gradient(ctx.weight, len(head.chunks)) if need_weight else None
        grad_NH = head_gradients(head, backward, sink, need_hidden, lambda panel: ctx.cache.take(panel, live))
        filled = head.weight_VH.shape[0] if head.chunks else 0
        grad_weight_VH = None if sink is None else sink.autograd_gradient(filled)
        if grad_NH is None:
            return None, grad_weight_VH, None, None
        grad_NH = grad_NH.to(hidden_LH.dtype)
        if live is not None:
            grad_NH = grad_NH.new_zeros(call.rows.count, grad_NH.shape[1]).index_copy_(0, live, grad_NH)
        return call.rows.reduce_hidden_grad(grad_NH), grad_weight_VH, None, None


def _check_shapes(
    hidden_SBH: Tensor, weight_VH: Tensor, targets_SB: Tensor, mask: Tensor | None, shards: int
) -> None:
    hidden, weight, targets = list(hidden_SBH.shape), list(weight_VH.shape), list(targets_SB.shape)
    if len(weight) != 2 or len(hidden) != len(targets) + 1 or weight[1] != hidden[-1]:
        raise ValueError(
            f"hidden states {hidden}, weight {weight} and targets {targets} are not [S, B, H], [V, H], [S, B]"
        )
    if [hidden[0] * shards, *hidden[1:-1]] != targets:
        raise ValueError(f"{shards} sequence shards of hidden states {hidden} do not match targets {targets}")
    if mask is not None and list(mask.shape) != targets:
        raise ValueError(f"mask {list(mask.shape)} and targets {targets} must have the same shape")
    if weight_VH.dtype != hidden_SBH.dtype:
        raise ValueError(f"hidden states are {hidden_SBH.dtype}, but the weight is {weight_VH.dtype}")


def linear_logprobs(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    targets_SB: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    with_entropy: bool = False,
    options: LinearLogprobsOptions = _DEFAULT_OPTIONS,
) -> Tensor | tuple[Tensor, Tensor]:
    """The plain twin of `fused_linear_logprobs` on a single rank: log_softmax and gather over all the logits.

    Plain differentiable tensor arithmetic, kept to say what the kernel computes and to be compared with it.
    """
    dtype = accumulation_dtype(hidden_SBH.dtype)
    logits_SBV = (hidden_SBH @ weight_VH[: options.vocab_size].t()).to(dtype) * (
        options.logit_scale / temperature
    )
    logp_SBV = torch.log_softmax(logits_SBV, -1)
    kept_SB = torch.ones_like(targets_SB, dtype=torch.bool) if mask is None else mask != 0
    index_SB1 = torch.where(kept_SB, targets_SB, 0).unsqueeze(-1)
    logprob_SB = torch.where(kept_SB, logp_SBV.gather(-1, index_SB1).squeeze(-1), 0.0)
    if not with_entropy:
        return logprob_SB
    return logprob_SB, torch.where(kept_SB, -(logp_SBV.exp() * logp_SBV).sum(-1), 0.0)
