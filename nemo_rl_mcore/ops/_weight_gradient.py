"""Where the gradient of the vocabulary weight goes: a tensor for autograd, or Megatron's `main_grad`.

Shapes: V vocabulary rows of this rank, v of them in a panel, n token rows of a tile, H hidden.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_mcore.ops._products import Scratch, add_weight_product, weight_product_into
from nemo_rl_mcore.ops._softmax import accumulation_dtype


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
