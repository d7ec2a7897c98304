"""Softmax statistics that combine over slices of the vocabulary, and the gradient they lead to.

Shapes: N token rows, V a slice of the vocabulary, K slices, F floats per row: the log-sum-exp, the target's
logit and, when asked for, the entropy. A panel of a matrix and a tensor-parallel rank are both just slices,
so one merge rule serves them both. Statistics are float64 whatever the logits are: they are few, and a
log-sum-exp near 128 that is rounded to float32 once per merge would cost the log-probability 1e-5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import TokenRows, all_gather_rows


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, sums and results: float64 stays, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class RowSoftmax:
    """The softmax over the whole vocabulary, one row per token; the log-sum-exp stays float64."""

    lse_N: Tensor
    logprob_N: Tensor
    entropy_N: Tensor | None


def empty_statistics(slices: int, rows_NX: Tensor, with_entropy: bool) -> Tensor:
    """Return uninitialised statistics [K, F, N] for the rows of a tensor."""
    return rows_NX.new_empty(slices, 3 if with_entropy else 2, rows_NX.shape[0], dtype=torch.float64)


def merge_statistics(stats_KFN: Tensor) -> Tensor:
    """Combine the statistics of disjoint slices into those of their union; none at all give -inf.

    The entropy follows the chain rule: with w the share of each slice, H = sum w * H_slice + entropy(w).
    """
    lse_KN = stats_KFN[:, 0]
    lse_N = torch.logsumexp(lse_KN, 0)
    merged = [lse_N, stats_KFN[:, 1].sum(0)]
    if stats_KFN.shape[1] == 3:
        # Where every slice is empty, -inf - -inf would be no number.
        share_KN = torch.exp(lse_KN - lse_N.clamp_min(torch.finfo(lse_N.dtype).min))
        between_KN = -torch.xlogy(share_KN, share_KN)
        merged.append((share_KN * stats_KFN[:, 2] + between_KN).sum(0))
    return torch.stack(merged)


def gather_over_ranks(stats_FN: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return every rank's statistics [R, F, N], in the same order on all ranks; one all-gather, none for no rows."""
    if group is None or group.size() == 1:
        return stats_FN.unsqueeze(0)
    if stats_FN.shape[1] == 0:
        return stats_FN.expand(group.size(), *stats_FN.shape)
    return all_gather_rows(stats_FN, group).view(group.size(), *stats_FN.shape)


def reduce_over_ranks(stats_FN: Tensor, group: ProcessGroup | None, dtype: torch.dtype) -> RowSoftmax:
    """Merge every rank's statistics."""
    stats_RFN = gather_over_ranks(stats_FN, group)
    if stats_RFN.shape[0] > 1:
        stats_FN = merge_statistics(stats_RFN)
    entropy_N = stats_FN[2].to(dtype) if stats_FN.shape[0] == 3 else None
    return RowSoftmax(stats_FN[0], (stats_FN[1] - stats_FN[0]).to(dtype), entropy_N)


@dataclass(frozen=True)
class RowBackward:
    """What each row of logits needs to become its gradient: the saved softmax and the incoming gradients.

    The two entropy fields are both None when no gradient arrives through the entropy.
    """

    lse_N: Tensor
    grad_logprob_N: Tensor
    entropy_N: Tensor | None = None
    grad_entropy_N: Tensor | None = None

    @classmethod
    def arriving(
        cls,
        rows: TokenRows,
        scale: float,
        softmax: tuple[Tensor, Tensor | None],
        grads: tuple[Tensor | None, ...],
    ) -> "RowBackward":
        """Pair the kept rows' softmax with autograd's gradients of them.

        The gradients cover all tokens, and either may be missing. `scale`, the factor of the logits, is
        folded into them here, where it costs nothing.
        """
        lse_N, entropy_N = softmax
        grad_logprob_T, grad_entropy_T = (*grads, None)[:2]
        grad_logprob_N, grad_entropy_N = (
            None if grad_T is None else rows.select(grad_T.reshape(-1)) * scale
            for grad_T in (grad_logprob_T, grad_entropy_T)
        )
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(lse_N if grad_entropy_N is None else grad_entropy_N)
        return cls(lse_N, grad_logprob_N, None if grad_entropy_N is None else entropy_N, grad_entropy_N)

    def at(self, index: slice | Tensor) -> "RowBackward":
        """Return the same for some of the rows."""

        def pick(x_N: Tensor | None) -> Tensor | None:
            return None if x_N is None else x_N[index]

        return RowBackward(
            self.lse_N[index], self.grad_logprob_N[index], pick(self.entropy_N), pick(self.grad_entropy_N)
        )

    def with_factor_of_p(self, factor_N: Tensor) -> "RowBackward":
        """Return the same for probabilities that were computed without this factor, which is close to one."""
        factor = factor_N.to(self.grad_logprob_N.dtype)
        if self.entropy_N is None or self.grad_entropy_N is None:
            return RowBackward(self.lse_N, self.grad_logprob_N * factor)
        # The entropy's gradient holds log p beside the entropy.
        entropy_N = self.entropy_N + factor_N.log().to(factor.dtype)
        return RowBackward(self.lse_N, self.grad_logprob_N * factor, entropy_N, self.grad_entropy_N * factor)

    def live_rows(self) -> Tensor | None:
        """Return the indices of the rows that a gradient (or a NaN) reaches, None if that is all of them."""
        live_N = self.grad_logprob_N != 0
        if self.grad_entropy_N is not None:
            live_N = live_N | (self.grad_entropy_N != 0)
        index = live_N.nonzero().squeeze(1)
        return None if index.numel() == live_N.numel() else index
