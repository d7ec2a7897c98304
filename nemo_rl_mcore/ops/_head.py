"""The vocabulary head walked in tiles, never holding the logits of all tokens over the whole vocabulary.

Shapes: N token rows, H hidden, V this rank's real vocabulary rows, n x v one tile of logits, K vocabulary
panels, F floats per row. Panels are the outer loop and token chunks the inner one, so that a panel's weight
gradient is summed over all tokens in one float32 accumulator of [v, H] and rounded once, whatever the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._elementwise import logits_gradient, slice_statistics
from nemo_rl_mcore.ops._groups import TokenRows, VocabShard, group_size
from nemo_rl_mcore.ops._products import (
    AutogradWeightGradient,
    MainGradAccumulation,
    Scratch,
    WeightGradient,
    add_hidden_product,
    logits_into,
    tile_dtype,
    weight_operand,
)
from nemo_rl_mcore.ops._softmax import RowBackward, accumulation_dtype, empty_statistics, merge_statistics

GradientTile = tuple[slice, Tensor, Tensor]
"""Token rows, gradient of their logits [n, v] in the weight's dtype, columns [n, K] of its largest entries.

A column outside the tile belongs to another panel.
"""

_MAX_CHUNK_ROWS = 4096  # a taller chunk no longer saves accumulator traffic in the weight gradient
_MAX_CPU_BYTES = 16 << 20  # on CPU a larger tile gains nothing, and costs page faults when it is mapped
_ENTRIES_BLOCK = 1 << 18  # elements of the weight rows that are gathered at a time
_MIN_PANEL_COLS = 256  # a narrower panel would make the matrix products inefficient
_PANEL_STEP = 128  # of columns: GPUs multiply in blocks of this size


@dataclass(frozen=True)
class Tiling:
    """Size of a tile of logits: token rows by vocabulary columns."""

    rows: int
    cols: int


def plan_tiling(
    row_count: int, vocab: int, *, bytes_per_logit: int, chunk_bytes: int, chunk_size: int | None
) -> Tiling:
    """Fit a tile into the byte budget, or take `chunk_size` rows by the whole vocabulary if that is given."""
    row_count, vocab = max(row_count, 1), max(vocab, 1)
    if chunk_size is not None:
        return Tiling(min(chunk_size, row_count), vocab)
    budget = max(chunk_bytes // bytes_per_logit, 1)
    rows = min(row_count, _MAX_CHUNK_ROWS)
    widest = max(budget // rows // _PANEL_STEP * _PANEL_STEP, _MIN_PANEL_COLS)
    cols = min(vocab, _even_share(vocab, widest, _PANEL_STEP))
    return Tiling(_even_share(row_count, min(rows, max(budget // cols, 1)), 1), cols)


def _even_share(total: int, most: int, step: int) -> int:
    """Return the size of pieces, none much smaller than the others: a multiple of `step`, as `most` is."""
    count = -(-total // most)
    return -(-total // (count * step)) * step


def tiling_for(hidden_NH: Tensor, vocab: int, chunk_bytes: int, chunk_size: int | None) -> Tiling:
    """Plan the tiles of these rows, each with a 16-bit copy where the logits are wider than the inputs."""
    logit, factor = tile_dtype(hidden_NH), hidden_NH.dtype
    return plan_tiling(
        hidden_NH.shape[0],
        vocab,
        bytes_per_logit=logit.itemsize + (0 if logit == factor else factor.itemsize),
        chunk_bytes=min(chunk_bytes, _MAX_CPU_BYTES) if hidden_NH.device.type == "cpu" else chunk_bytes,
        chunk_size=chunk_size,
    )


def _spans(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


class LogitsCache:
    """Panels of logits that the forward leaves to the backward, as many as fit a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._panels: dict[int, Tensor] = {}

    def reserve(self, panel: slice, rows_NH: Tensor) -> Tensor | None:
        """Return the memory [N, v] for the panel's logits, or None if it exceeds what is left of the budget."""
        shape, dtype = (rows_NH.shape[0], panel.stop - panel.start), tile_dtype(rows_NH)
        size = shape[0] * shape[1] * dtype.itemsize
        if size > self._left:
            return None
        self._left -= size
        self._panels[panel.start] = rows_NH.new_empty(shape, dtype=dtype)
        return self._panels[panel.start]

    def take(self, panel: slice) -> Tensor | None:
        """Give away the panel's logits, which the gradient overwrites: a second backward recomputes them."""
        return self._panels.pop(panel.start, None)


@dataclass(frozen=True)
class LinearHead:
    """The rows and the slice of the vocabulary to work on.

    Tiles hold hidden @ weight.T; the elementwise passes apply `scale`, which costs nothing there and, with
    16-bit logits, rounds as the unfused path does.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    scale: float
    tiling: Tiling
    _memory: Scratch = field(default_factory=Scratch, init=False)
    _gradient_memory: Scratch = field(default_factory=Scratch, init=False)

    @property
    def panels(self) -> list[slice]:
        """Return vocabulary panels, the outer loop."""
        return list(_spans(self.weight_VH.shape[0], self.tiling.cols))

    @property
    def chunks(self) -> list[slice]:
        """Return token chunks, the inner loop."""
        return list(_spans(self.hidden_NH.shape[0], self.tiling.rows))

    def tiles(self, panel: slice, into_NV: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Walk a panel: (rows, logits [n, v], targets within the panel).

        Logits are written into the panel `into_NV` if that is given; else all tiles share the same memory.
        """
        for rows in self.chunks:
            hidden_nH, weight_vH = self.hidden_NH[rows], self.weight_VH[panel]
            logits_nv = self._tile(rows, panel) if into_NV is None else into_NV[rows]
            logits_into(logits_nv, hidden_nH, weight_vH)
            yield rows, logits_nv, self.target_N[rows] - panel.start

    def gradient_tiles(
        self, panel: slice, backward: RowBackward, cached_NV: Tensor | None, live: Tensor | None
    ) -> Iterator[GradientTile]:
        """Walk a panel's tiles and turn each into its gradient.

        `cached_NV` are the forward's logits, if it kept them, of which the head's rows are those at `live`.
        """
        tiles = self.tiles(panel) if cached_NV is None else self._cached_tiles(panel, cached_NV, live)
        for rows, logits_nv, target_n in tiles:
            yield rows, self.gradient_tile(logits_nv, target_n, backward.at(rows)), target_n.unsqueeze(1)

    def gradient_tile(self, logits_nv: Tensor, target_n: Tensor, backward: RowBackward) -> Tensor:
        """Turn a tile of logits into their gradient, in place unless 16-bit products need it rounded."""
        out_nv = logits_nv
        if logits_nv.dtype != self.weight_VH.dtype:
            out_nv = self._gradient_memory.view(logits_nv.shape[0], logits_nv.shape[1], self.weight_VH)
        return logits_gradient(logits_nv, target_n, backward, out_nv, self.scale)

    def _cached_tiles(
        self, panel: slice, cached_NV: Tensor, live: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for rows in self.chunks:
            if live is None:
                logits_nv = cached_NV[rows]
            else:  # a tile at a time: all live rows of the panel would be as much memory again
                logits_nv = torch.index_select(cached_NV, 0, live[rows], out=self._tile(rows, panel))
            yield rows, logits_nv, self.target_N[rows] - panel.start

    def _tile(self, rows: slice, panel: slice) -> Tensor:
        height, width = rows.stop - rows.start, panel.stop - panel.start
        return self._memory.view(height, width, self.hidden_NH, tile_dtype(self.hidden_NH))


def head_statistics(head: LinearHead, with_entropy: bool, cache: LogitsCache) -> Tensor:
    """Softmax statistics [F, N] of this rank's vocabulary (see `_softmax`)."""
    stats_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy)
    for stats_FN, panel in zip(stats_KFN, head.panels, strict=True):
        for rows, logits_nv, target_n in head.tiles(panel, cache.reserve(panel, head.hidden_NH)):
            stats_FN[:, rows] = slice_statistics(logits_nv, target_n, with_entropy, head.scale)
    return merge_statistics(stats_KFN)


def sum_gradients(
    head: LinearHead,
    tiles: Callable[[slice], Iterator[GradientTile]],
    weight_gradient: WeightGradient | None,
    need_hidden: bool,
) -> Tensor | None:
    """Multiply the gradient of the logits, panel by panel, into those of hidden states and weight.

    Feeds `weight_gradient` unless that is None (frozen weight). Returns the hidden gradient [N, H] of this
    rank's vocabulary in the accumulation dtype, or None unless `need_hidden`.
    """
    wide = accumulation_dtype(head.hidden_NH.dtype)
    grad_hidden_NH = torch.zeros_like(head.hidden_NH, dtype=wide) if need_hidden else None
    weighted_NH = None if weight_gradient is None else weight_operand(head.hidden_NH)
    scratch = Scratch()
    # Only CUDA adds 16-bit products to float32 without rounding them first; a single one may be rounded.
    rounds = len(head.panels) > 1 and wide != head.hidden_NH.dtype and not head.hidden_NH.is_cuda
    for panel in head.panels:
        for rows, tile_nv, largest_nK in tiles(panel):
            if grad_hidden_NH is not None:
                operands = grad_hidden_NH[rows], tile_nv, head.weight_VH[panel], scratch
                if rounds:
                    _add_largest_apart(*operands, largest_nK)
                else:
                    add_hidden_product(*operands)
            if weight_gradient is not None and weighted_NH is not None:
                weight_gradient.add(panel, tile_nv, weighted_NH[rows])
        if weight_gradient is not None:
            weight_gradient.finish(panel)
    return grad_hidden_NH


def _add_largest_apart(
    out_nH: Tensor, tile_nv: Tensor, weight_vH: Tensor, scratch: Scratch, largest_nK: Tensor
) -> None:
    """Add tile @ weight, but leave the largest entries, which mostly outweigh the others, out of the product.

    They are added on their own, unrounded.
    """
    row_p, which_p = ((largest_nK >= 0) & (largest_nK < tile_nv.shape[1])).nonzero().unbind(1)
    column_p = largest_nK[row_p, which_p]
    entry_p = tile_nv[row_p, column_p]
    for span in _spans(row_p.numel(), max(_ENTRIES_BLOCK // out_nH.shape[1], 1)):
        weight_pH = weight_vH[column_p[span]].to(out_nH.dtype)
        out_nH.index_add_(0, row_p[span], weight_pH.mul_(entry_p[span].to(out_nH.dtype).unsqueeze(1)))
    tile_nv[row_p, column_p] = 0
    add_hidden_product(out_nH, tile_nv, weight_vH, scratch)
    tile_nv[row_p, column_p] = entry_p


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
