"""What the functions over a vocabulary head have in common: their arguments, and the frame of their backward.

Shapes: S sequence, B batch, H hidden, V this rank's vocabulary rows, L token rows held by this rank, N those of
all ranks that the mask keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import VocabShard, group_size
from nemo_rl_mcore.ops._head_tiles import (
    GradientTile,
    LinearHead,
    LogitsCache,
    Tiling,
    sum_gradients,
    tiling_for,
)
from nemo_rl_mcore.ops._softmax import accumulation_dtype
from nemo_rl_mcore.ops._token_rows import TokenRows
from nemo_rl_mcore.ops._weight_gradient import AutogradWeightGradient, MainGradAccumulation, WeightGradient


@dataclass(frozen=True)
class LinearLogprobsOptions:
    """Rarely changed settings of the functions over a vocabulary head."""

    chunk_bytes: int = 64 << 20
    """Working memory of one tile of logits, in bytes; the tile's rows and columns follow from it."""
    chunk_size: int | None = None
    """Token rows per chunk, each against the rank's whole vocabulary; overrides the byte budget."""
    vocab_size: int | None = None
    """Real size of the global vocabulary; padded rows beyond it stay out of the softmax. None: no padding."""
    logit_scale: float = 1.0
    """Factor on the logits (MuP), applied with the temperature."""
    cache_bytes: int = 0
    """Logits that the forward may keep for the backward, in bytes; panels that fit are not computed twice."""
    cache_bytes_per_logit: int | None = None
    """Besides, at most so many bytes for each logit of a call; None: no such bound. One byte is less than any logit
    takes, so that not all of them are kept, and follows the rows that a mask leaves."""
    accumulate_main_grad: bool = False
    """Add the weight's gradient to its `main_grad`, as Megatron's gradient_accumulation_fusion does, and set
    `grad_added_to_main_grad` for the data-parallel hook."""

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or (self.chunk_size is not None and self.chunk_size <= 0):
            raise ValueError(f"chunk_bytes and chunk_size must be positive: {self}")
        if self.cache_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative: {self}")
        if self.cache_bytes_per_logit is not None and self.cache_bytes_per_logit < 0:
            raise ValueError(f"cache_bytes_per_logit must not be negative: {self}")


@dataclass(frozen=True)
class HeadArguments:
    """What the caller says besides the tensors (see `fused_linear_logprobs`)."""

    tp_group: ProcessGroup | None
    sequence_parallel: bool
    temperature: float
    mask: Tensor | None
    with_entropy: bool
    options: LinearLogprobsOptions

    def tokens_of(self, hidden_SBH: Tensor) -> torch.Size:
        """Return [S, B] of the whole sequence, of which the hidden states may be one shard."""
        shards = group_size(self.tp_group) if self.sequence_parallel else 1
        return torch.Size([hidden_SBH.shape[0] * shards, *hidden_SBH.shape[1:-1]])

    def check(self, hidden_SBH: Tensor, weight_VH: Tensor) -> None:
        """Raise ValueError for what does not fit together."""
        hidden, weight = list(hidden_SBH.shape), list(weight_VH.shape)
        if len(weight) != 2 or len(hidden) < 2 or weight[1] != hidden[-1]:
            raise ValueError(f"hidden states {hidden} and weight {weight} are not [S, B, H] and [V, H]")
        if weight_VH.dtype != hidden_SBH.dtype:
            raise ValueError(f"hidden states are {hidden_SBH.dtype}, but the weight is {weight_VH.dtype}")
        if self.mask is not None:
            self.check_tokens("mask", self.mask.shape, hidden_SBH)
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if self.options.logit_scale <= 0:
            raise ValueError(f"logit_scale must be positive, not {self.options.logit_scale}")

    def check_tokens(self, name: str, shape: torch.Size, hidden_SBH: Tensor) -> None:
        """Raise ValueError unless a tensor named `name` has one entry for each token."""
        tokens = self.tokens_of(hidden_SBH)
        if shape != tokens:
            raise ValueError(
                f"{name} {list(shape)} must have the shape {list(tokens)} of the tokens: hidden states are "
                f"{list(hidden_SBH.shape)}{', one sequence shard' if self.sequence_parallel else ''}"
            )


@dataclass(frozen=True)
class HeadCall:
    """What forward and backward share besides the tensors of the graph."""

    tokens: torch.Size
    rows: TokenRows
    tp_group: ProcessGroup | None
    scale: float
    with_entropy: bool
    options: LinearLogprobsOptions
    wanted: tuple[bool, bool]
    """Whether gradients of the hidden states and of the weight are wanted."""

    @classmethod
    def of(cls, hidden_SBH: Tensor, weight_VH: Tensor, arguments: HeadArguments) -> HeadCall:
        """Check the arguments and prepare the call; raise ValueError for those that do not fit."""
        arguments.check(hidden_SBH, weight_VH)
        tokens, group, options = arguments.tokens_of(hidden_SBH), arguments.tp_group, arguments.options
        rows = TokenRows.of(arguments.mask, tokens.numel(), group, arguments.sequence_parallel)
        # Inside an autograd function gradients are always off, so whether there will be a backward is asked here.
        trains = torch.is_grad_enabled()
        wanted = trains and hidden_SBH.requires_grad, trains and weight_VH.requires_grad
        if wanted[1] and options.accumulate_main_grad and not hasattr(weight_VH, "main_grad"):
            raise ValueError(
                "accumulate_main_grad needs a weight with main_grad, a parameter of Megatron's DDP"
            )
        scale = options.logit_scale / arguments.temperature
        return cls(tokens, rows, group, scale, arguments.with_entropy, options, wanted)

    def shard(self, weight_VH: Tensor) -> VocabShard:
        """Return the part of the vocabulary that the weight holds."""
        return VocabShard.of(weight_VH.shape[0], self.options.vocab_size, self.tp_group)

    def head(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> LinearHead:
        """Return the head over this rank's real vocabulary rows, for token rows with global target ids or without."""
        shard, options = self.shard(weight_VH), self.options
        if tiling is None:
            tiling = tiling_for(hidden_NH, shard.valid, options.chunk_bytes, options.chunk_size)
        if target_N is None:
            target_N = hidden_NH.new_full(hidden_NH.shape[:1], -1, dtype=torch.int64)
        return LinearHead(hidden_NH, weight_VH[: shard.valid], target_N - shard.start, self.scale, tiling)

    def cache(self, head: LinearHead) -> LogitsCache:
        """Return the room for the logits that a backward would compute again; none where there will not be one."""
        budget, per_logit = self.options.cache_bytes, self.options.cache_bytes_per_logit
        if not any(self.wanted):
            return LogitsCache(0)
        if per_logit is not None:
            budget = min(budget, head.hidden_NH.shape[0] * head.weight_VH.shape[0] * per_logit)
        return LogitsCache(budget)

    def weight_gradient(self, weight_VH: Tensor, chunks: int) -> WeightGradient:
        """Return where the weight's gradient goes."""
        if self.options.accumulate_main_grad:
            return MainGradAccumulation(weight_VH)
        return AutogradWeightGradient(weight_VH, chunks)

    def spread(self, x_N: Tensor) -> Tensor:
        """Return the results of the kept rows in the shape of the tokens, with exact zeros elsewhere."""
        return self.rows.spread(x_N).view(*self.tokens, *x_N.shape[1:])


@dataclass(frozen=True)
class HeadBackward:
    """What a backward returns to: the inputs of the forward, and which of their gradients are needed."""

    call: HeadCall
    hidden_LH: Tensor
    weight_VH: Tensor
    """The parameter itself: what saved tensors give back may lack its main_grad."""
    tiling: Tiling
    needed: tuple[bool, bool]

    def gradients(
        self,
        target_N: Tensor | None,
        live: Tensor | None,
        tiles: Callable[[LinearHead, slice], Iterator[GradientTile]],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the hidden states [L, H] and of the weight, None where not needed.

        Collectives move the same rows as in the forward; only the products leave out rows without gradient.
        `live` are the others, None if that is all of them; theirs are the targets, if any, and the rows of the tiles.
        `tiles` gives the gradient of a panel's logits.
        """
        rows = self.call.rows
        hidden_NH = rows.gather_hidden(self.hidden_LH)
        head = self.call.head(
            hidden_NH if live is None else hidden_NH[live], self.weight_VH, target_N, self.tiling
        )
        need_hidden, need_weight = self.needed
        sink = self.call.weight_gradient(self.weight_VH, len(head.chunks)) if need_weight else None
        grad_NH = sum_gradients(head, lambda panel: tiles(head, panel), sink, need_hidden)
        filled = head.weight_VH.shape[0] if head.chunks else 0
        grad_weight_VH = None if sink is None else sink.autograd_gradient(filled)
        if grad_NH is None:
            return None, grad_weight_VH
        grad_NH = grad_NH.to(self.hidden_LH.dtype)
        if live is not None:
            grad_NH = grad_NH.new_zeros(rows.count, grad_NH.shape[1]).index_copy_(0, live, grad_NH)
        return rows.reduce_hidden_grad(grad_NH), grad_weight_VH


def plain_logits(
    hidden_SBH: Tensor, weight_VH: Tensor, temperature: float, options: LinearLogprobsOptions
) -> Tensor:
    """Return all the logits [S, B, V], as the plain twins take them."""
    logits_SBV = hidden_SBH @ weight_VH[: options.vocab_size].t()
    return logits_SBV.to(accumulation_dtype(hidden_SBH.dtype)) * (options.logit_scale / temperature)
