"""The forward of a head whose weight is frozen, which leaves the backward nothing but a scaling.

The gradient of log p(target) by a hidden state is scale * (W[target] - sum_v p_v W[v]), a vector that does
not depend on the loss. Forming it while a tile of logits is at hand takes two matrix products in place of the
three of a backward that recomputes the logits. It needs one pass over the panels, with the sum rescaled
whenever the running log-sum-exp grows.

Shapes: N token rows, n of them in a tile, v columns of a tile, K panels, F floats per row, H hidden.
"""

import torch
from torch import Tensor

from nemo_rl_mcore.ops._elementwise import slice_statistics
from nemo_rl_mcore.ops._head_tiles import LinearHead
from nemo_rl_mcore.ops._products import Scratch, add_hidden_product
from nemo_rl_mcore.ops._softmax import RowBackward, accumulation_dtype, empty_statistics, merge_statistics


def frozen_head_statistics(head: LinearHead) -> tuple[Tensor, Tensor]:
    """Softmax statistics [F, N], and the mean [N, H] of this rank's weight rows under its own softmax."""
    wide = accumulation_dtype(head.hidden_NH.dtype)
    stats_KFN = empty_statistics(len(head.panels), head.hidden_NH, with_entropy=False)
    lse_N = stats_KFN.new_full((head.hidden_NH.shape[0],), float("-inf"))
    mean_NH = torch.zeros_like(head.hidden_NH, dtype=wide)
    scratch = Scratch()
    for stats_FN, panel in zip(stats_KFN, head.panels, strict=True):
        for rows, logits_nv, target_n in head.tiles(panel):
            stats_FN[:, rows] = slice_statistics(logits_nv, target_n, False, head.scale)
            grown_n = torch.logaddexp(lse_N[rows], stats_FN[0, rows])
            # The gradient of -log p of a target elsewhere is the softmax itself.
            as_loss = RowBackward(grown_n, mean_NH.new_full(grown_n.shape, -1.0))
            softmax_nv = head.gradient_tile(logits_nv, torch.full_like(target_n, -1), as_loss)
            mean_NH[rows].mul_(torch.exp(lse_N[rows] - grown_n).to(wide).unsqueeze(1))
            add_hidden_product(mean_NH[rows], softmax_nv, head.weight_VH[panel], scratch)
            lse_N[rows] = grown_n
    return merge_statistics(stats_KFN), mean_NH


def logprob_direction(head: LinearHead, mean_NH: Tensor, share_N: Tensor) -> Tensor:
    """Return this rank's part of W[target] - sum_v p_v W[v], [N, H] in the dtype of the input.

    `share_N` is the probability that this rank's slice of the vocabulary has of the whole.
    """
    direction_NH = mean_NH.mul_(-share_N.to(mean_NH.dtype).unsqueeze(1))
    held = ((head.target_N >= 0) & (head.target_N < head.weight_VH.shape[0])).nonzero().squeeze(1)
    target_rows = head.weight_VH.index_select(0, head.target_N[held]).to(mean_NH.dtype)
    return direction_NH.index_add_(0, held, target_rows).to(head.hidden_NH.dtype)
