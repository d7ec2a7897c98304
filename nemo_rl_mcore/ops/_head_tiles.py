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

_MAX_CHUNK_ROWS = 4096  # a taller chunk no longer saves accumulator traffic in the weight gradient
_MAX_CPU_BYTES = 16 << 20  # on CPU a larger tile gains nothing, and costs page faults when it is mapped
_MIN_PANEL_COLS = 256  # a narrower panel would make the matrix products inefficient


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
    widest = min(vocab, max(budget // rows, _MIN_PANEL_COLS))
    cols = -(-vocab // -(-vocab // widest))  # even panels: no narrow one at the end
    return Tiling(min(rows, max(budget // cols, 1)), cols)


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
        """Memory [N, v] for the panel's logits, or None if it exceeds what is left of the budget."""
        shape, dtype = (rows_NH.shape[0], panel.stop - panel.start), tile_dtype(rows_NH)
        size = shape[0] * shape[1] * dtype.itemsize
        if size > self._left:
            return None
        self._left -= size
        self._panels[panel.start] = rows_NH.new_empty(shape, dtype=dtype)
        return self._panels[panel.start]

    def take(self, panel: slice, live: Tensor | None) -> Tensor | None:
        """Give away the panel's logits, which the gradient overwrites: a second backward recomputes them."""
        logits_NV = self._panels.pop(panel.start, None)
        return logits_NV if live is None or logits_NV is None else logits_NV[live]


@dataclass(frozen=True)
class LinearHead:
    """The rows and the slice of the vocabulary to work on. Logits are `scale * hidden @ weight.T`."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    scale: float
    tiling: Tiling
    _memory: Scratch = field(default_factory=Scratch, init=False)
    _gradient_memory: Scratch = field(default_factory=Scratch, init=False)

    @property
    def panels(self) -> list[slice]:
        """Vocabulary panels, the outer loop."""
        return list(_spans(self.weight_VH.shape[0], self.tiling.cols))

    @property
    def chunks(self) -> list[slice]:
        """Token chunks, the inner loop."""
        return list(_spans(self.hidden_NH.shape[0], self.tiling.rows))

    def tiles(self, panel: slice, into_NV: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Walk a panel: (rows, logits [n, v], targets within the panel).

        Logits are written into the panel `into_NV` if that is given; else all tiles share the same memory.
        """
        for rows in self.chunks:
            hidden_nH, weight_vH = self.hidden_NH[rows], self.weight_VH[panel]
            logits_nv = self._tile(rows, panel) if into_NV is None else into_NV[rows]
            logits_into(logits_nv, hidden_nH, weight_vH, self.scale)
            yield rows, logits_nv, self.target_N[rows] - panel.start

    def gradient_tiles(
        self, panel: slice, backward: RowBackward, cached_NV: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Walk a panel: (rows, gradient of the logits [n, v] in the weight's dtype, targets within it)."""
        if cached_NV is None:
            tiles = self.tiles(panel)
        else:
            tiles = ((rows, cached_NV[rows], self.target_N[rows] - panel.start) for rows in self.chunks)
        for rows, logits_nv, target_n in tiles:
            yield rows, self.gradient_tile(logits_nv, target_n, backward.at(rows)), target_n

    def gradient_tile(self, logits_nv: Tensor, target_n: Tensor, backward: RowBackward) -> Tensor:
        """Turn a tile of logits into their gradient, in place unless 16-bit products need it rounded."""
        out_nv = logits_nv
        if logits_nv.dtype != self.weight_VH.dtype:
            out_nv = self._gradient_memory.view(logits_nv.shape[0], logits_nv.shape[1], self.weight_VH)
        return logits_gradient(logits_nv, target_n, backward, out_nv)

    def _tile(self, rows: slice, panel: slice) -> Tensor:
        height, width = rows.stop - rows.start, panel.stop - panel.start
        return self._memory.view(height, width, self.hidden_NH, tile_dtype(self.hidden_NH))


def head_statistics(head: LinearHead, with_entropy: bool, cache: LogitsCache) -> Tensor:
    """Softmax statistics [F, N] of this rank's vocabulary (see `_softmax`)."""
    stats_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy)
    for stats_FN, panel in zip(stats_KFN, head.panels, strict=True):
        for rows, logits_nv, target_n in head.tiles(panel, cache.reserve(panel, head.hidden_NH)):
            stats_FN[:, rows] = slice_statistics(logits_nv, target_n, with_entropy)
    return merge_statistics(stats_KFN)


def head_gradients(
    head: LinearHead,
    backward: RowBackward,
    weight_gradient: WeightGradient | None,
    need_hidden: bool,
    cached: Callable[[slice], Tensor | None],
) -> Tensor | None:
    """Form the gradients of hidden states and weight, tile by tile.

    The incoming gradients in `backward` must already carry the factor `head.scale` of the logits. Feeds
    `weight_gradient` unless that is None (frozen weight). Returns the hidden gradient [N, H] of this rank's
    vocabulary in the accumulation dtype, or None unless `need_hidden`. `cached` gives a panel's logits, or
    None where they are to be computed again.
    """
    wide = accumulation_dtype(head.hidden_NH.dtype)
    grad_hidden_NH = torch.zeros_like(head.hidden_NH, dtype=wide) if need_hidden else None
    weighted_NH = None if weight_gradient is None else weight_operand(head.hidden_NH)
    scratch = Scratch()
    for panel in head.panels:
        for rows, tile_nv, target_n in head.gradient_tiles(panel, backward, cached(panel)):
            if grad_hidden_NH is not None:
                weight_vH, one_of_several = head.weight_VH[panel], target_n if len(head.panels) > 1 else None
                add_hidden_product(grad_hidden_NH[rows], tile_nv, weight_vH, scratch, one_of_several)
            if weight_gradient is not None and weighted_NH is not None:
                weight_gradient.add(panel, tile_nv, weighted_NH[rows])
        if weight_gradient is not None:
            weight_gradient.finish(panel)
    return grad_hidden_NH
