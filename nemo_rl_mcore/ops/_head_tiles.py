"""The vocabulary head walked in tiles, never holding the logits of all tokens over the whole vocabulary.

Shapes: N token rows, H hidden, V this rank's real vocabulary rows, n x v one tile of logits, K vocabulary
panels, F floats per row. Panels are the outer loop and token chunks the inner one, so that a panel's weight
gradient is summed over all tokens in one float32 accumulator of [v, H] and rounded once, whatever the chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_mcore.ops._softmax import (
    RowBackward,
    accumulation_dtype,
    empty_statistics,
    logits_gradient_,
    merge_statistics,
    slice_statistics,
)

_MAX_CHUNK_ROWS = 4096  # a taller chunk no longer saves accumulator traffic in the weight gradient
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


def _spans(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


@dataclass(frozen=True)
class LinearHead:
    """The rows and the slice of the vocabulary to work on. Logits are `scale * hidden @ weight.T`."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    scale: float
    tiling: Tiling

    def panels(self) -> list[slice]:
        """Vocabulary panels, the outer loop."""
        return list(_spans(self.weight_VH.shape[0], self.tiling.cols))

    def tiles(self, panel: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Walk a panel: (rows, logits [n, v], targets within the panel). All tiles share the same memory."""
        count = self.hidden_NH.shape[0]
        dtype = accumulation_dtype(self.hidden_NH.dtype)
        weight_vH = self.weight_VH[panel]
        scratch = self.hidden_NH.new_empty(min(count, self.tiling.rows), weight_vH.shape[0], dtype=dtype)
        for rows in _spans(count, self.tiling.rows):
            hidden_nH = self.hidden_NH[rows]
            logits_nv = _matmul_into(scratch[: hidden_nH.shape[0]], hidden_nH, weight_vH.t())
            if self.scale != 1.0:
                logits_nv.mul_(self.scale)
            yield rows, logits_nv, self.target_N[rows] - panel.start


def head_statistics(head: LinearHead, with_entropy: bool) -> Tensor:
    """Softmax statistics [F, N] of this rank's vocabulary (see `_softmax`)."""
    panels = head.panels()
    stats_KFN = empty_statistics(len(panels), head.hidden_NH, with_entropy)
    for stats_FN, panel in zip(stats_KFN, panels, strict=True):
        for rows, logits_nv, target_n in head.tiles(panel):
            stats_FN[:, rows] = slice_statistics(logits_nv, target_n, with_entropy)
    return merge_statistics(stats_KFN)


def head_gradients(
    head: LinearHead, backward: RowBackward, grad_weight_VH: Tensor | None, need_hidden: bool
) -> Tensor | None:
    """Recompute the logits tile by tile and form the gradients of hidden states and weight.

    The incoming gradients in `backward` must already carry the factor `head.scale` of the logits. Fills
    `grad_weight_VH` unless it is None (frozen weight). Returns the hidden gradient [N, H] of this rank's
    vocabulary in the accumulation dtype, or None unless `need_hidden`.
    """
    dtype = accumulation_dtype(head.hidden_NH.dtype)
    grad_hidden_NH = torch.zeros_like(head.hidden_NH, dtype=dtype) if need_hidden else None
    for panel in head.panels():
        weight_vH = head.weight_VH[panel]
        panel_grad_vH = None if grad_weight_VH is None else torch.zeros_like(weight_vH, dtype=dtype)
        for rows, logits_nv, target_n in head.tiles(panel):
            tile_nv = logits_gradient_(logits_nv, target_n, backward.at(rows)).to(weight_vH.dtype)
            if grad_hidden_NH is not None:
                _matmul_add(grad_hidden_NH[rows], tile_nv, weight_vH)
            if panel_grad_vH is not None:
                _matmul_add(panel_grad_vH, tile_nv.t(), head.hidden_NH[rows])
        if grad_weight_VH is not None and panel_grad_vH is not None:
            grad_weight_VH[panel] = panel_grad_vH
    return grad_hidden_NH


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Write a @ b, where `out` may be wider than the inputs."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return out.copy_(_matmul_wide(a, b))


def _matmul_add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, accumulated in the dtype of `out`."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(_matmul_wide(a, b))


def _matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """Product of 16-bit matrices, in float32 where the device can write it; CPU rounds it to 16 bits."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b)
