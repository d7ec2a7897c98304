"""The vocabulary head walked in tiles, never holding the logits of all tokens over the whole vocabulary.

Shapes: N token rows, H hidden, V this rank's real vocabulary rows, n x v one tile of logits, K vocabulary
panels, F floats per row. Panels are the outer loop and token chunks the inner one, so that a panel's weight
gradient is summed over all tokens in one float32 accumulator of [v, H] and rounded once, whatever the chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_mcore.ops._elementwise import logits_gradient, slice_statistics
from nemo_rl_mcore.ops._products import Scratch, add_hidden_product, logits_into, tile_dtype, weight_operand
from nemo_rl_mcore.ops._softmax import (
    RowBackward,
    accumulation_dtype,
    empty_statistics,
    merge_statistics,
)
from nemo_rl_mcore.ops._weight_gradient import WeightGradient

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
