"""The three matrix products of a tile of logits, into memory that is allocated once for all tiles.

Shapes: n token rows by v vocabulary columns of a tile, H hidden.
"""

from dataclasses import dataclass, field

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
