"""A softmax in two parts: a few logits that are held apart, and the tail, which is all the others.

The tail is summed by itself, with the few taken out of the tiles, so its mass is exact however small: one
minus the others' probabilities would be rounding error from 1e-7 on.

Shapes: N token rows, K logits held apart in each, n x v a tile of logits, p places in it, F statistics a row (see
`_softmax`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_mcore.ops._elementwise import slice_statistics
from nemo_rl_mcore.ops._softmax import RowBackward, merge_statistics

_NEGLIGIBLE = -1e30  # leaves room for the factor of the logits


def take_out(
    logits_nv: Tensor, place: tuple[Tensor, Tensor], with_entropy: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Take the K logits of each row (or fewer) at (rows, columns) out of a tile.

    Returns them times `scale` in float64, and the statistics [F, n] of what is left. In their place the tile
    keeps a logit that adds nothing to a sum with real ones. It is finite because the entropy multiplies it by
    its probability, which is zero.
    """
    taken = logits_nv[place].double() * scale
    logits_nv[place] = max(torch.finfo(logits_nv.dtype).min, _NEGLIGIBLE)
    row_p = place[0].reshape(-1)
    taken_n = row_p.new_zeros(logits_nv.shape[0]).index_add_(0, row_p, torch.ones_like(row_p))
    stats_Fn = slice_statistics(logits_nv, torch.full_like(taken_n, -1), with_entropy, scale)
    return taken, torch.where(taken_n < logits_nv.shape[1], stats_Fn, _of_nothing(stats_Fn))


def _of_nothing(stats_FN: Tensor) -> Tensor:
    """Return the statistics, of the same shape, of slices without a column."""
    return merge_statistics(stats_FN.new_empty(0, *stats_FN.shape))


def add_logits(stats_FN: Tensor, logit_NK: Tensor) -> Tensor:
    """Return statistics of a slice together with single logits beside it, each of which is a slice of one column."""
    slices_KFN = stats_FN.new_zeros(logit_NK.shape[1], *stats_FN.shape)
    slices_KFN[:, 0] = logit_NK.t()
    return merge_statistics(torch.cat([stats_FN.unsqueeze(0), slices_KFN]))


@dataclass(frozen=True)
class SplitSoftmax:
    """The softmax over the whole vocabulary, in float64 like all statistics."""

    logprob_NK: Tensor
    lse_N: Tensor
    tail_lse_N: Tensor
    entropy_N: Tensor | None

    @classmethod
    def of(cls, logit_NK: Tensor, tail_FN: Tensor) -> SplitSoftmax:
        """Join the two parts; a tail of no ids at all has the log-sum-exp -inf."""
        whole_FN = add_logits(tail_FN, logit_NK)
        return cls(
            logprob_NK=logit_NK - whole_FN[0].unsqueeze(1),
            lse_N=whole_FN[0],
            tail_lse_N=tail_FN[0],
            entropy_N=whole_FN[2] if whole_FN.shape[0] == 3 else None,
        )

    @property
    def tail_logmass_N(self) -> Tensor:
        """Log of the probability of the tail."""
        return self.tail_lse_N - self.lse_N


@dataclass(frozen=True)
class SplitBackward:
    """What each row of logits needs to become its gradient: the saved softmax and the incoming gradients.

    The incoming gradients carry the factor of the logits. Without an entropy among the outputs its fields
    are None.
    """

    logprob_NK: Tensor
    tail_lse_N: Tensor
    tail_logmass_N: Tensor
    entropy_N: Tensor | None
    grad_logprob_NK: Tensor
    grad_tail_N: Tensor
    grad_entropy_N: Tensor | None

    def live_rows(self) -> Tensor | None:
        """Return the indices of the rows that a gradient (or a NaN) reaches, None if that is all of them."""
        live_N = (self.grad_logprob_NK != 0).any(1) | (self.grad_tail_N != 0)
        if self.grad_entropy_N is not None:
            live_N = live_N | (self.grad_entropy_N != 0)
        index = live_N.nonzero().squeeze(1)
        return None if index.numel() == live_N.numel() else index

    def at(self, index: Tensor) -> SplitBackward:
        """Return the same for some of the rows."""
        entropy = None if self.entropy_N is None else self.entropy_N[index]
        grad_entropy = None if self.grad_entropy_N is None else self.grad_entropy_N[index]
        return SplitBackward(
            self.logprob_NK[index],
            self.tail_lse_N[index],
            self.tail_logmass_N[index],
            entropy,
            self.grad_logprob_NK[index],
            self.grad_tail_N[index],
            grad_entropy,
        )

    def outside(self) -> RowBackward:
        """Return the gradient of the tail's logits, as that of a softmax over the tail alone.

        With t the log of the tail's mass, q_v = p_v / exp(t), G the sum of the gradients of the log-probabilities
        and g_t, e those of t and of the entropy H:
        dL/dz_v = -q_v * (G exp(t) + g_t expm1(t) + e exp(t) (log q_v + t + H)).
        Written with p_v, a factor exp(-t) would overflow where the tail is small.
        """
        mass_N = self.tail_logmass_N.exp()
        grad_N = self.grad_logprob_NK.sum(1) * mass_N + self.grad_tail_N * torch.expm1(self.tail_logmass_N)
        if self.entropy_N is None or self.grad_entropy_N is None:
            return RowBackward(self.tail_lse_N, grad_N)
        entropy_N = self.entropy_N + self.tail_logmass_N
        return RowBackward(self.tail_lse_N, grad_N, entropy_N, self.grad_entropy_N * mass_N)

    def inside_NK(self) -> Tensor:
        """Return the gradient of the logits held apart: dL/dz_k = g_k - p_k * (G + g_t + e * (log p_k + H)).

        As -g_k expm1(log p_k) - p_k (G - g_k ...) it keeps its digits where p_k is close to one.
        """
        grad_NK, logprob_NK = self.grad_logprob_NK, self.logprob_NK
        others_NK = grad_NK.sum(1, keepdim=True) - grad_NK + self.grad_tail_N.unsqueeze(1)
        if self.entropy_N is not None and self.grad_entropy_N is not None:
            others_NK += self.grad_entropy_N.unsqueeze(1) * (logprob_NK + self.entropy_N.unsqueeze(1))
        return -grad_NK * torch.expm1(logprob_NK) - logprob_NK.exp() * others_NK
