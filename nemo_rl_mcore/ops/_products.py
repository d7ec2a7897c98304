"""The three matrix products of a tile of logits, into memory that is allocated once for all tiles.

Shapes: n token rows by v vocabulary columns of a tile, H hidden.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_mcore.ops._elementwise import add_blocks_
from nemo_rl_mcore.ops._softmax import accumulation_dtype

_ALIGNED_COLS = 64


@dataclass
class Scratch:
    """One piece of memory that is reused for tensors of different shapes, never two at a time."""

    _memory: Tensor | None = field(default=None, init=False)

    def view(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised [rows, cols], of the dtype of `like` if no other is given.

        The dtype must always be the same. The largest request should come first: the others reuse it.
        """
        # On an H200 a product takes 3.4 times as long where rows of 16 bits do not begin at multiples of 16 bytes.
        stride = -(-cols // _ALIGNED_COLS) * _ALIGNED_COLS if like.is_cuda else cols
        if self._memory is None or self._memory.numel() < rows * stride:
            self._memory = like.new_empty(rows * stride, dtype=dtype or like.dtype)
        return self._memory[: rows * stride].view(rows, stride)[:, :cols]


def tile_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a tile of logits: CUDA can write 16-bit products in float32, CPU cannot."""
    return accumulation_dtype(x.dtype) if x.is_cuda else x.dtype


def logits_into(out_nv: Tensor, hidden_nH: Tensor, weight_vH: Tensor) -> Tensor:
    """Write hidden @ weight.T."""
    if out_nv.dtype != hidden_nH.dtype:
        return torch.mm(hidden_nH, weight_vH.t(), out_dtype=out_nv.dtype, out=out_nv)
    return torch.mm(hidden_nH, weight_vH.t(), out=out_nv)


def add_hidden_product(out_nH: Tensor, tile_nv: Tensor, weight_vH: Tensor, scratch: Scratch) -> None:
    """Add tile @ weight, in the dtype of `out_nH`."""
    if not _add_in_one_call(out_nH, tile_nv, weight_vH):
        product_nH = scratch.view(out_nH.shape[0], out_nH.shape[1], like=tile_nv)
        add_blocks_(out_nH, torch.mm(tile_nv, weight_vH, out=product_nH))


def add_weight_product(
    out_vH: Tensor, tile_nv: Tensor, hidden_nH: Tensor, scratch: Scratch, transposed: Scratch
) -> None:
    """Add tile.T @ hidden, in the dtype of `out_vH`."""
    if not _add_in_one_call(out_vH, tile_nv.t(), hidden_nH):
        product_vH = scratch.view(out_vH.shape[0], out_vH.shape[1], like=tile_nv)
        weight_product_into(product_vH, tile_nv, hidden_nH, transposed)
        add_blocks_(out_vH, product_vH)


def _add_in_one_call(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Add a @ b where the device can do so without rounding the product first; say whether it could."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        return False
    return True


def weight_operand(hidden_NH: Tensor) -> Tensor:
    """Return the hidden states laid out as `weight_product_into` wants them."""
    return hidden_NH.t().contiguous().t() if _transposes(hidden_NH) else hidden_NH


def weight_product_into(out_vH: Tensor, tile_nv: Tensor, hidden_nH: Tensor, scratch: Scratch) -> None:
    """Write tile.T @ hidden, in the dtype of the tile."""
    if not _transposes(tile_nv):
        torch.mm(tile_nv.t(), hidden_nH, out=out_vH)
        return
    transposed_Hv = scratch.view(out_vH.shape[1], out_vH.shape[0], like=tile_nv)
    out_vH.copy_(torch.mm(hidden_nH.t(), tile_nv, out=transposed_Hv).t())


def _transposes(x: Tensor) -> bool:
    """Return whether (hidden.T @ tile).T replaces tile.T @ hidden.

    On CPU a transposed left factor halves the speed of 16-bit products. Transposing the hidden states, once
    for all tiles, and the result costs little beside that.
    """
    return x.device.type == "cpu" and x.dtype.itemsize == 2


class WeightGradient(Protocol):
    """Takes the gradient tile by tile; all tiles of a panel come before the next panel."""

    def add(self, panel: slice, tile_nv: Tensor, hidden_nH: Tensor) -> None:
        """Add tile.T @ hidden to the panel's rows."""
        ...

    def finish(self, panel: slice) -> None:
        """Say that the panel has had its last tile."""
        ...

    def autograd_gradient(self, filled: int) -> Tensor | None:
        """Return what backward returns for the weight, whose first `filled` rows the panels covered."""
        ...


class AutogradWeightGradient:
    """The gradient [V, H] as a tensor in the weight's dtype, rounded once whatever the chunks."""

    def __init__(self, weight_VH: Tensor, chunks: int) -> None:
        self.grad_VH = torch.empty_like(weight_VH)
        self._chunks = chunks
        self._sum_vH: Tensor | None = None
        self._sum, self._product, self._transposed = Scratch(), Scratch(), Scratch()

    def add(self, panel: slice, tile_nv: Tensor, hidden_nH: Tensor) -> None:
        """Write the panel's only product, or add one of several to a sum in the accumulation dtype."""
        grad_vH = self.grad_VH[panel]
        if self._chunks == 1:
            weight_product_into(grad_vH, tile_nv, hidden_nH, self._transposed)
            return
        if self._sum_vH is None:
            wide = accumulation_dtype(grad_vH.dtype)
            self._sum_vH = self._sum.view(grad_vH.shape[0], grad_vH.shape[1], grad_vH, wide).zero_()
        add_weight_product(self._sum_vH, tile_nv, hidden_nH, self._product, self._transposed)

    def finish(self, panel: slice) -> None:
        """Round the sum into its place."""
        if self._sum_vH is not None:
            self.grad_VH[panel].copy_(self._sum_vH)
            self._sum_vH = None

    def autograd_gradient(self, filled: int) -> Tensor:
        """Return the gradient, with zeros after the first `filled` rows, which no panel covers."""
        self.grad_VH[filled:].zero_()
        return self.grad_VH


class MainGradAccumulation:
    """Adds to the `main_grad` of a Megatron parameter, as its gradient_accumulation_fusion does."""

    def __init__(self, weight_VH: Any) -> None:
        self._weight = weight_VH
        self._product, self._transposed = Scratch(), Scratch()

    def add(self, panel: slice, tile_nv: Tensor, hidden_nH: Tensor) -> None:
        """Add straight into the buffer, whose dtype sets the precision of the sum."""
        main_grad_vH = self._weight.main_grad[panel]
        add_weight_product(main_grad_vH, tile_nv, hidden_nH, self._product, self._transposed)

    def finish(self, panel: slice) -> None:
        """Nothing is pending."""

    def autograd_gradient(self, filled: int) -> Tensor | None:
        """Tell the data-parallel hook that the gradient is in place; return the gradient it wants to see.

        The hook must find some gradient, or it would run on another thread; it reads its values only where
        `zero_out_wgrad` says so (tied embeddings, whose other use adds to the same gradient).
        """
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
