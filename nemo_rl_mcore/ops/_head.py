"""The vocabulary head in tiles: the logits of all tokens over the whole vocabulary never exist at once.

Shapes: N token rows, H hidden, V this rank's real vocabulary rows, n x v a tile of logits, K vocabulary panels,
F floats per row. Panels are the outer loop and token chunks the inner one, so that a panel's weight gradient is summed
over all tokens in one float32 accumulator [v, H] and rounded once, for any number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import TokenRows, VocabShard, group_size
from nemo_rl_mcore.ops._softmax import (
    RowBackward,
    accumulation_dtype,
    add_blocks_,
    logits_gradient,
    spans,
)

GradientTile = tuple[slice, Tensor, Tensor]
"""Token rows, the gradient by their logits [n, v] in the weight's dtype, and columns [n, K] of its largest entries.

A column outside the tile belongs to another panel.
"""

_ALIGNED_COLS = 64
_MAX_CHUNK_ROWS = 4096  # taller chunks save no further accumulator traffic in the weight gradient
_MAX_CPU_BYTES = 16 << 20  # on CPU larger tiles gain nothing, and cost page faults
_ENTRIES_BLOCK = 1 << 18  # elements of weight rows gathered at a time
_MIN_PANEL_COLS = 256  # narrower panels make the matrix products inefficient
_PANEL_STEP = 128  # columns: GPUs multiply in blocks of this size


@dataclass
class Scratch:
    """Memory that is reused for tensors of different shapes, one at a time."""

    _memory: Tensor | None = field(default=None, init=False)

    def view(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised [rows, cols], of the first call's dtype (default: `like`'s); the largest first."""
        # On an H200 a product takes 3.4 times as long if 16-bit rows do not begin at multiples of 16 bytes.
        stride = -(-cols // _ALIGNED_COLS) * _ALIGNED_COLS if like.is_cuda else cols
        if self._memory is None or self._memory.numel() < rows * stride:
            self._memory = like.new_empty(rows * stride, dtype=dtype or like.dtype)
        return self._memory[: rows * stride].view(rows, stride)[:, :cols]


def tile_dtype(x: Tensor) -> torch.dtype:
    """Return a logits tile's dtype: CUDA can write 16-bit products in float32, CPU cannot."""
    return accumulation_dtype(x.dtype) if x.is_cuda else x.dtype


def add_product(out: Tensor, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add a @ b in the dtype of `out`, without rounding the product first if the device supports that."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        add_blocks_(out, torch.mm(a, b, out=scratch.view(out.shape[0], out.shape[1], like=a)))


def _transposes(x: Tensor) -> bool:
    """Return true if (hidden.T @ tile).T replaces tile.T @ hidden: on CPU, twice as fast for 16-bit products."""
    return x.device.type == "cpu" and x.dtype.itemsize == 2


class WeightGradient:
    """Sums the weight's gradient tile by tile, panel after panel.

    The gradient is a tensor [V, H], rounded once for any number of chunks; with `into_main_grad` it is added to a
    Megatron parameter's `main_grad`, as in Megatron's gradient_accumulation_fusion.
    """

    def __init__(self, weight_VH: Any, chunks: int, *, into_main_grad: bool) -> None:
        self._weight, self._chunks, self._into_main_grad = weight_VH, chunks, into_main_grad
        self._grad_VH = None if into_main_grad else torch.empty_like(weight_VH)
        self._sum_vH: Tensor | None = None
        self._sum, self._product, self._transposed = Scratch(), Scratch(), Scratch()

    def add(self, panel: slice, tile_nv: Tensor, hidden_nH: Tensor) -> None:
        """Add tile.T @ hidden to the panel's rows: a single product is written, several are summed unrounded.

        Products are added to a `main_grad` at once: its dtype sets the sum's precision.
        """
        if self._grad_VH is None:
            sum_vH = self._weight.main_grad[panel]
        elif self._chunks == 1:
            self._write_product(self._grad_VH[panel], tile_nv, hidden_nH)
            return
        else:
            if self._sum_vH is None:
                rows, hidden = panel.stop - panel.start, hidden_nH.shape[1]
                wide = accumulation_dtype(self._grad_VH.dtype)
                self._sum_vH = self._sum.view(rows, hidden, self._grad_VH, wide).zero_()
            sum_vH = self._sum_vH
        if sum_vH.dtype == tile_nv.dtype or sum_vH.is_cuda:
            add_product(sum_vH, tile_nv.t(), hidden_nH, self._product)
        else:
            product_vH = self._product.view(sum_vH.shape[0], sum_vH.shape[1], like=tile_nv)
            self._write_product(product_vH, tile_nv, hidden_nH)
            add_blocks_(sum_vH, product_vH)

    def _write_product(self, out_vH: Tensor, tile_nv: Tensor, hidden_nH: Tensor) -> None:
        if not _transposes(tile_nv):
            torch.mm(tile_nv.t(), hidden_nH, out=out_vH)
            return
        transposed_Hv = self._transposed.view(out_vH.shape[1], out_vH.shape[0], like=tile_nv)
        out_vH.copy_(torch.mm(hidden_nH.t(), tile_nv, out=transposed_Hv).t())

    def finish(self, panel: slice) -> None:
        """Round the panel's sum, if any, into the gradient after its last tile."""
        if self._sum_vH is not None and self._grad_VH is not None:
            self._grad_VH[panel].copy_(self._sum_vH)
            self._sum_vH = None

    def autograd_gradient(self, filled: int) -> Tensor | None:
        """Return backward's result for the weight; rows after the first `filled`, which panels cover, are zero.

        For a `main_grad`, mark the gradient as in place for the data-parallel hook. The hook needs some gradient, or
        it would run on another thread; it reads the values only under `zero_out_wgrad` (tied embeddings).
        """
        weight = self._weight
        if self._grad_VH is not None:
            self._grad_VH[filled:].zero_()
            return self._grad_VH
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


@dataclass(frozen=True)
class Tiling:
    """A logits tile's size: token rows by vocabulary columns."""

    rows: int
    cols: int


def plan_tiling(
    row_count: int, vocab: int, *, bytes_per_logit: int, chunk_bytes: int, chunk_size: int | None
) -> Tiling:
    """Fit a tile into the byte budget, or return `chunk_size` rows by the whole vocabulary, if given."""
    row_count, vocab = max(row_count, 1), max(vocab, 1)
    if chunk_size is not None:
        return Tiling(min(chunk_size, row_count), vocab)
    budget = max(chunk_bytes // bytes_per_logit, 1)
    rows = min(row_count, _MAX_CHUNK_ROWS)
    widest = max(budget // rows // _PANEL_STEP * _PANEL_STEP, _MIN_PANEL_COLS)
    cols = min(vocab, _even_share(vocab, widest, _PANEL_STEP))
    return Tiling(_even_share(row_count, min(rows, max(budget // cols, 1)), 1), cols)


def _even_share(total: int, most: int, step: int) -> int:
    """Return a size of about equal pieces, at most `most`; both are multiples of `step`."""
    count = -(-total // most)
    return -(-total // (count * step)) * step


@dataclass
class LogitsCache:
    """Panels of logits that the forward keeps for the backward, within a budget of bytes."""

    _left: int
    _panels: dict[int, Tensor] = field(default_factory=dict[int, Tensor], init=False)

    def reserve(self, panel: slice, rows_NH: Tensor) -> Tensor | None:
        """Return memory [N, v] for the panel's logits, or None if it exceeds the remaining budget."""
        shape, dtype = (rows_NH.shape[0], panel.stop - panel.start), tile_dtype(rows_NH)
        size = shape[0] * shape[1] * dtype.itemsize
        if size > self._left:
            return None
        self._left -= size
        self._panels[panel.start] = rows_NH.new_empty(shape, dtype=dtype)
        return self._panels[panel.start]

    def take(self, panel: slice) -> Tensor | None:
        """Return the panel's logits and drop them from the cache."""
        return self._panels.pop(panel.start, None)


@dataclass(frozen=True)
class LinearHead:
    """Token rows and a slice of the vocabulary; tiles hold hidden @ weight.T, not yet times `scale`.

    The elementwise passes apply `scale`: there it costs nothing and, with 16-bit logits, rounds as in the unfused path.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    scale: float
    tiling: Tiling
    panels: list[slice]
    """Slices of the vocabulary, the outer loop."""
    chunks: list[slice]
    """Slices of the tokens, the inner loop."""
    _memory: Scratch = field(default_factory=Scratch, init=False)
    _gradient_memory: Scratch = field(default_factory=Scratch, init=False)

    def tiles(self, panel: slice, into_NV: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a panel's (rows, logits [n, v], targets within the panel); without `into_NV` tiles share memory."""
        for rows in self.chunks:
            logits_nv = self._logits(rows, panel, None if into_NV is None else into_NV[rows])
            yield rows, logits_nv, self.target_N[rows] - panel.start

    def gradient_tiles(
        self, panel: slice, backward: RowBackward, cached_NV: Tensor | None, live: Tensor | None
    ) -> Iterator[GradientTile]:
        """Yield a panel's tiles, turned into gradients; cached_NV: the panel's logits from the forward, if kept."""
        for rows in self.chunks:
            if cached_NV is None:
                logits_nv = self._logits(rows, panel)
            elif live is None:
                logits_nv = cached_NV[rows]
            else:
                # One tile at a time: gathering all of the panel's live rows would double the memory.
                logits_nv = torch.index_select(cached_NV, 0, live[rows], out=self._tile(rows, panel))
            target_n = self.target_N[rows] - panel.start
            yield rows, self.gradient_tile(logits_nv, target_n, backward.at(rows)), target_n.unsqueeze(1)

    def gradient_tile(self, logits_nv: Tensor, target_n: Tensor, backward: RowBackward) -> Tensor:
        """Turn a logits tile into its gradient, in place unless 16-bit products need it rounded."""
        out_nv = logits_nv
        if logits_nv.dtype != self.weight_VH.dtype:
            out_nv = self._gradient_memory.view(logits_nv.shape[0], logits_nv.shape[1], self.weight_VH)
        return logits_gradient(logits_nv, target_n, backward, out_nv, self.scale)

    def _tile(self, rows: slice, panel: slice) -> Tensor:
        height, width = rows.stop - rows.start, panel.stop - panel.start
        return self._memory.view(height, width, self.hidden_NH, tile_dtype(self.hidden_NH))

    def _logits(self, rows: slice, panel: slice, out_nv: Tensor | None = None) -> Tensor:
        """Compute a tile of logits, in the shared memory unless `out_nv` is given."""
        hidden_nH, weight_Hv = self.hidden_NH[rows], self.weight_VH[panel].t()
        out_nv = self._tile(rows, panel) if out_nv is None else out_nv
        if out_nv.dtype == hidden_nH.dtype:
            torch.mm(hidden_nH, weight_Hv, out=out_nv)
        else:
            torch.mm(hidden_nH, weight_Hv, out_dtype=out_nv.dtype, out=out_nv)
        return out_nv


def _add_largest_apart(
    out_nH: Tensor, tile_nv: Tensor, weight_vH: Tensor, scratch: Scratch, largest_nK: Tensor
) -> None:
    """Add tile @ weight; the tile's largest entries, which mostly outweigh the others, are added apart, unrounded."""
    row_p, which_p = ((largest_nK >= 0) & (largest_nK < tile_nv.shape[1])).nonzero().unbind(1)
    column_p = largest_nK[row_p, which_p]
    entry_p = tile_nv[row_p, column_p]
    for span in spans(row_p.numel(), max(_ENTRIES_BLOCK // out_nH.shape[1], 1)):
        weight_pH = weight_vH[column_p[span]].to(out_nH.dtype)
        out_nH.index_add_(0, row_p[span], weight_pH.mul_(entry_p[span].to(out_nH.dtype).unsqueeze(1)))
    tile_nv[row_p, column_p] = 0
    add_product(out_nH, tile_nv, weight_vH, scratch)
    tile_nv[row_p, column_p] = entry_p


@dataclass(frozen=True)
class LinearLogprobsOptions:
    """Rarely changed settings of the functions over a vocabulary head."""

    chunk_bytes: int = 64 << 20
    """A logits tile's working memory in bytes, which sets its rows and columns."""
    chunk_size: int | None = None
    """Token rows per tile, with the rank's whole vocabulary as columns; overrides the byte budget."""
    vocab_size: int | None = None
    """Real size of the global vocabulary; padded rows behind it stay out of the softmax. None: no padding."""
    logit_scale: float = 1.0
    """Factor on the logits (MuP), applied with the temperature."""
    cache_bytes: int = 0
    """Bytes of logits that the forward may keep for the backward; panels that fit are not computed twice."""
    cache_bytes_per_logit: int | None = None
    """A second bound, in bytes for each logit of a call; None: no such bound. Since a logit takes two bytes or more, 1
    keeps at most half of them, and adapts to the rows that a mask leaves."""
    accumulate_main_grad: bool = False
    """Add the weight's gradient to its `main_grad`, as in Megatron's gradient_accumulation_fusion, and set
    `grad_added_to_main_grad` for the data-parallel hook."""

    def __post_init__(self) -> None:
        least = {"chunk_bytes": 1, "chunk_size": 1, "cache_bytes": 0, "cache_bytes_per_logit": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}: {self}")


DEFAULT_OPTIONS = LinearLogprobsOptions()


@dataclass(frozen=True)
class HeadCall:
    """State that forward and backward share, besides the graph's tensors."""

    tokens: torch.Size
    """[S, B] of the whole sequence; the hidden states may be one shard of it."""
    rows: TokenRows
    tp_group: ProcessGroup | None
    scale: float
    options: LinearLogprobsOptions
    wanted: tuple[bool, bool]
    """True if a gradient is needed: by the hidden states, by the weight."""

    @classmethod
    def of(
        cls,
        hidden_SBH: Tensor,
        weight_VH: Tensor,
        per_token: dict[str, torch.Size],
        tp_group: ProcessGroup | None,
        sequence_parallel: bool,
        temperature: float,
        mask: Tensor | None,
        options: LinearLogprobsOptions,
    ) -> HeadCall:
        """Check the arguments, see `fused_linear_logprobs`; raises ValueError.

        per_token: shapes, by name, that must be [S, B].
        """
        hidden, weight = list(hidden_SBH.shape), list(weight_VH.shape)
        if len(weight) != 2 or len(hidden) < 2 or weight[1] != hidden[-1]:
            raise ValueError(f"hidden states {hidden} and weight {weight} are not [S, B, H] and [V, H]")
        if weight_VH.dtype != hidden_SBH.dtype:
            raise ValueError(f"hidden states are {hidden_SBH.dtype}, but the weight is {weight_VH.dtype}")
        shards = group_size(tp_group) if sequence_parallel else 1
        tokens = torch.Size([hidden[0] * shards, *hidden[1:-1]])
        for name, shape in (({} if mask is None else {"mask": mask.shape}) | per_token).items():
            if shape != tokens:
                raise ValueError(
                    f"{name} {list(shape)} must have the shape {list(tokens)} of the tokens: hidden states are "
                    f"{hidden}{', one sequence shard' if sequence_parallel else ''}"
                )
        for name, value in (("temperature", temperature), ("logit_scale", options.logit_scale)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        rows = TokenRows.of(mask, tokens.numel(), tp_group, sequence_parallel)
        # Inside an autograd function gradients are always off: a later backward can only be foreseen here.
        trains = torch.is_grad_enabled()
        wanted = trains and hidden_SBH.requires_grad, trains and weight_VH.requires_grad
        if wanted[1] and options.accumulate_main_grad and not hasattr(weight_VH, "main_grad"):
            raise ValueError(
                "accumulate_main_grad needs a weight with main_grad, a parameter of Megatron's DDP"
            )
        return cls(tokens, rows, tp_group, options.logit_scale / temperature, options, wanted)

    def shard(self, weight_VH: Tensor) -> VocabShard:
        """Return the weight's part of the vocabulary."""
        return VocabShard.of(weight_VH.shape[0], self.options.vocab_size, self.tp_group)

    def head(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> LinearHead:
        """Return the head over this rank's real vocabulary rows; target_N: global ids, if any."""
        shard, chunk_bytes = self.shard(weight_VH), self.options.chunk_bytes
        if tiling is None:
            # Logits that are wider than the inputs need a 16-bit copy of each.
            logit, factor = tile_dtype(hidden_NH), hidden_NH.dtype
            on_cpu = hidden_NH.device.type == "cpu"
            tiling = plan_tiling(
                hidden_NH.shape[0],
                shard.valid,
                bytes_per_logit=logit.itemsize + (0 if logit == factor else factor.itemsize),
                chunk_bytes=min(chunk_bytes, _MAX_CPU_BYTES) if on_cpu else chunk_bytes,
                chunk_size=self.options.chunk_size,
            )
        if target_N is None:
            target_N = hidden_NH.new_full(hidden_NH.shape[:1], -1, dtype=torch.int64)
        weight_VH, target_N = weight_VH[: shard.valid], target_N - shard.start
        panels, chunks = spans(weight_VH.shape[0], tiling.cols), spans(hidden_NH.shape[0], tiling.rows)
        return LinearHead(hidden_NH, weight_VH, target_N, self.scale, tiling, [*panels], [*chunks])

    def cache(self, head: LinearHead) -> LogitsCache:
        """Return a cache for logits that a backward would recompute; an empty one without a backward."""
        budget, per_logit = self.options.cache_bytes, self.options.cache_bytes_per_logit
        if not any(self.wanted):
            return LogitsCache(0)
        if per_logit is not None:
            budget = min(budget, head.hidden_NH.shape[0] * head.weight_VH.shape[0] * per_logit)
        return LogitsCache(budget)


def head_gradients(
    ctx: Any,
    hidden_LH: Tensor,
    target_N: Tensor | None,
    live: Tensor | None,
    tiles: Callable[[LinearHead, slice], Iterator[GradientTile]],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients for the hidden states [L, H] and for the weight, or None where not needed.

    live: the rows with a gradient, None for all; target_N and the rows of `tiles` contain only these. tiles: yields the
    gradients for a panel's logits. ctx: holds the forward's `call`, `tiling` and `weight`, the parameter itself.
    """
    call: HeadCall = ctx.call
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    all_NH = call.rows.gather_hidden(hidden_LH)
    head = call.head(all_NH if live is None else all_NH[live], ctx.weight, target_N, ctx.tiling)
    hidden_NH = head.hidden_NH
    # Transposed once for all tiles, if their products need it.
    weighted_NH = hidden_NH.t().contiguous().t() if need_weight and _transposes(hidden_NH) else hidden_NH
    into_main_grad = call.options.accumulate_main_grad
    sink = (
        WeightGradient(ctx.weight, len(head.chunks), into_main_grad=into_main_grad) if need_weight else None
    )
    wide = accumulation_dtype(hidden_NH.dtype)
    grad_NH = torch.zeros_like(hidden_NH, dtype=wide) if need_hidden else None
    scratch = Scratch()
    # Only CUDA adds 16-bit products to float32 without rounding them first; a single product may be rounded.
    rounds = len(head.panels) > 1 and wide != hidden_NH.dtype and not hidden_NH.is_cuda
    for panel in head.panels:
        for rows, tile_nv, largest_nK in tiles(head, panel):
            if grad_NH is not None and rounds:
                _add_largest_apart(grad_NH[rows], tile_nv, head.weight_VH[panel], scratch, largest_nK)
            elif grad_NH is not None:
                add_product(grad_NH[rows], tile_nv, head.weight_VH[panel], scratch)
            if sink is not None:
                sink.add(panel, tile_nv, weighted_NH[rows])
        if sink is not None:
            sink.finish(panel)
    filled = head.weight_VH.shape[0] if head.chunks else 0
    grad_weight_VH = None if sink is None else sink.autograd_gradient(filled)
    if grad_NH is None:
        return None, grad_weight_VH
    grad_NH = grad_NH.to(hidden_LH.dtype)
    if live is not None:
        grad_NH = grad_NH.new_zeros(all_NH.shape).index_copy_(0, live, grad_NH)
    return call.rows.reduce_hidden_grad(grad_NH), grad_weight_VH
