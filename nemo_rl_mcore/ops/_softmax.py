"""Softmax statistics that combine over slices of the vocabulary, and the gradient they lead to.

Shapes: N token rows, V a slice of the vocabulary, K slices, F floats per row: the log-sum-exp, the target's
logit and, when asked for, the entropy. Targets are indices into the slice; one outside it belongs to
another slice. A panel of a matrix and a tensor-parallel rank are both just slices, so one merge rule serves
them both. Statistics are float64 whatever the logits are: they are few, and a log-sum-exp near 128 that is
rounded to float32 once per merge would cost the log-probability 1e-5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import all_gather_rows
from nemo_rl_mcore.ops._token_rows import TokenRows


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, sums and results: float64 stays, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class RowSoftmax:
    """The softmax over the whole vocabulary, one row per token."""

    lse_N: Tensor
    logprob_N: Tensor
    entropy_N: Tensor | None


def empty_statistics(slices: int, rows_NX: Tensor, with_entropy: bool) -> Tensor:
    """Uninitialised statistics [K, F, N] for the rows of a tensor."""
    return rows_NX.new_empty(slices, 3 if with_entropy else 2, rows_NX.shape[0], dtype=torch.float64)


def slice_statistics(logits_NV: Tensor, target_N: Tensor, with_entropy: bool) -> Tensor:
    """Return the statistics [F, N] of one slice. Overwrites `logits_NV`, which may be a scratch tile."""
    if logits_NV.shape[1] == 0:  # a rank that holds only padding contributes what no slices at all merge to
        return merge_statistics(empty_statistics(0, logits_NV, with_entropy))
    held_N, index_N1 = _held_targets(target_N, logits_NV.shape[1])
    target_logit_N = torch.where(held_N, logits_NV.gather(1, index_N1).squeeze(1), 0.0)
    max_N = logits_NV.amax(1)
    shifted_NV = logits_NV.sub_(max_N.unsqueeze(1))
    exp_NV = shifted_NV.exp() if with_entropy else shifted_NV.exp_()
    total_N = exp_NV.sum(1).double()
    stats = [max_N.double() + total_N.log(), target_logit_N.double()]
    if with_entropy:
        # Centred on the maximum, so large logits do not cancel: H = log(sum e) - sum(e * shifted) / sum(e).
        stats.append(total_N.log() - exp_NV.mul_(shifted_NV).sum(1) / total_N)
    return torch.stack(stats)


def merge_statistics(stats_KFN: Tensor) -> Tensor:
    """Combine the statistics of disjoint slices into those of their union; none at all give -inf.

    The entropy follows the chain rule: with w the share of each slice, H = sum w * H_slice + entropy(w).
    """
    lse_KN = stats_KFN[:, 0]
    lse_N = torch.logsumexp(lse_KN, 0)
    merged = [lse_N, stats_KFN[:, 1].sum(0)]
    if stats_KFN.shape[1] == 3:
        share_KN = torch.exp(lse_KN - lse_N)
        between_KN = -torch.xlogy(share_KN, share_KN)
        merged.append((share_KN * stats_KFN[:, 2] + between_KN).sum(0))
    return torch.stack(merged)


def reduce_over_ranks(stats_FN: Tensor, group: ProcessGroup | None, dtype: torch.dtype) -> RowSoftmax:
    """Merge every rank's statistics. One all-gather, and the same order of summation on all ranks."""
    if group is not None and group.size() > 1 and stats_FN.shape[1] > 0:
        stats_FN = merge_statistics(all_gather_rows(stats_FN, group).view(group.size(), *stats_FN.shape))
    entropy_N = stats_FN[2].to(dtype) if stats_FN.shape[0] == 3 else None
    return RowSoftmax(stats_FN[0].to(dtype), (stats_FN[1] - stats_FN[0]).to(dtype), entropy_N)


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
        grad_logprob_N = torch.zeros_like(lse_N)
        if grad_logprob_T is not None:
            grad_logprob_N = rows.select(grad_logprob_T.reshape(-1)) * scale
        if grad_entropy_T is None:
            return cls(lse_N, grad_logprob_N)
        return cls(lse_N, grad_logprob_N, entropy_N, rows.select(grad_entropy_T.reshape(-1)) * scale)

    def at(self, index: slice | Tensor) -> "RowBackward":
        """The same for some of the rows."""
        if self.entropy_N is None or self.grad_entropy_N is None:
            return RowBackward(self.lse_N[index], self.grad_logprob_N[index])
        return RowBackward(
            self.lse_N[index], self.grad_logprob_N[index], self.entropy_N[index], self.grad_entropy_N[index]
        )

    def live_rows(self) -> Tensor | None:
        """Indices of the rows that a gradient (or a NaN) reaches, None if that is all of them."""
        live_N = self.grad_logprob_N != 0
        if self.grad_entropy_N is not None:
            live_N = live_N | (self.grad_entropy_N != 0)
        index = live_N.nonzero().squeeze(1)
        return None if index.numel() == live_N.numel() else index


def logits_gradient_(logits_NV: Tensor, target_N: Tensor, rows: RowBackward) -> Tensor:
    """Turn one slice of the logits into their gradient, in place.

    With g and e the incoming gradients of the row's log-probability and entropy H:
    dL/dz_v = g * 1[v = target] - p_v * (g + e * (log p_v + H)).
    The one-hot term is added at the target's place, never formed as a tensor.
    """
    if logits_NV.shape[1] == 0:
        return logits_NV
    log_p_NV = logits_NV.sub_(rows.lse_N.unsqueeze(1))
    if rows.entropy_N is None or rows.grad_entropy_N is None:
        grad_NV = log_p_NV.exp_().mul_(-rows.grad_logprob_N.unsqueeze(1))
    else:
        p_NV = log_p_NV.exp()
        grad_entropy_N1 = rows.grad_entropy_N.unsqueeze(1)
        offset_N1 = rows.grad_logprob_N.unsqueeze(1) + grad_entropy_N1 * rows.entropy_N.unsqueeze(1)
        grad_NV = log_p_NV.mul_(grad_entropy_N1).add_(offset_N1).mul_(p_NV).neg_()
    held_N, index_N1 = _held_targets(target_N, logits_NV.shape[1])
    return grad_NV.scatter_add_(1, index_N1, torch.where(held_N, rows.grad_logprob_N, 0.0).unsqueeze(1))


def _held_targets(target_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in the slice, and a safe index [N, 1] for gather and scatter where they do not."""
    held_N = (target_N >= 0) & (target_N < width)
    return held_N, target_N.clamp(0, width - 1).unsqueeze(1)
