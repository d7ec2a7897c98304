"""The softmax of logits slice by slice: statistics that merge over slices of the vocabulary, and the gradient.

Shapes: N token rows, V a slice of the vocabulary, K slices, n rows of a block, F floats per row: the log-sum-exp, the
target's logit and, on request, the entropy. Panels of a matrix and tensor-parallel ranks are both slices, with one
merge rule. Statistics are always float64: they are few, and rounding a log-sum-exp near 128 to float32 at each merge
would cost the log-probability 1e-5. Targets are indices into the slice; one outside belongs to another slice.

Both passes over logits run in blocks of rows: each is copied into a float32 scratch block and processed there in place.
On CPU a block stays in the second-level cache, so that only the first and last operation touch memory, and nothing as
large as the logits is allocated: such memory is mapped anew each time, and its page faults would cost as much as the
arithmetic. On CUDA with Triton installed, two kernels replace both passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_rl_mcore.ops._groups import TokenRows, all_gather_rows

_LOG2_E = 1 / math.log(2)  # on CPU torch's exp2 is up to four times as fast as its exp
_CPU_BLOCK = 1 << 18  # elements: 1 MiB of float32
_DEVICE_BLOCK = 1 << 23  # large enough to make up for a kernel launch
NEGLIGIBLE = -1e30  # leaves room for the factor of the logits


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for logits, sums and results: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_statistics(slices: int, rows_NX: Tensor, with_entropy: bool) -> Tensor:
    """Return uninitialised statistics [K, F, N] for the rows of a tensor."""
    return rows_NX.new_empty(slices, 3 if with_entropy else 2, rows_NX.shape[0], dtype=torch.float64)


def merge_statistics(stats_KFN: Tensor) -> Tensor:
    """Merge disjoint slices' statistics. Entropy: H = sum w * H_slice + entropy(w), with the slices' shares w."""
    lse_KN = stats_KFN[:, 0]
    lse_N = torch.logsumexp(lse_KN, 0)
    merged = [lse_N, stats_KFN[:, 1].sum(0)]
    if stats_KFN.shape[1] == 3:
        # If every slice is empty, -inf - -inf would be NaN.
        share_KN = torch.exp(lse_KN - lse_N.clamp_min(torch.finfo(lse_N.dtype).min))
        between_KN = -torch.xlogy(share_KN, share_KN)
        merged.append((share_KN * stats_KFN[:, 2] + between_KN).sum(0))
    return torch.stack(merged)


def gather_over_ranks(stats_FN: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return all ranks' statistics [R, F, N], in the same order on every rank; one all-gather, none for no rows."""
    if group is None or group.size() == 1:
        return stats_FN.unsqueeze(0)
    if stats_FN.shape[1] == 0:
        return stats_FN.expand(group.size(), *stats_FN.shape)
    return all_gather_rows(stats_FN, group).view(group.size(), *stats_FN.shape)


@dataclass(frozen=True)
class RowSoftmax:
    """The softmax over the whole vocabulary, a row per token; the log-sum-exp is float64."""

    lse_N: Tensor
    logprob_N: Tensor
    entropy_N: Tensor | None

    @classmethod
    def over_ranks(cls, stats_FN: Tensor, group: ProcessGroup | None, dtype: torch.dtype) -> Self:
        """Merge all ranks' statistics."""
        stats_RFN = gather_over_ranks(stats_FN, group)
        if stats_RFN.shape[0] > 1:
            stats_FN = merge_statistics(stats_RFN)
        entropy_N = stats_FN[2].to(dtype) if stats_FN.shape[0] == 3 else None
        return cls(stats_FN[0], (stats_FN[1] - stats_FN[0]).to(dtype), entropy_N)


class _Backward:
    """Each row's terms for the gradient with respect to its logits: each field is a tensor indexed by row, or None."""

    def at(self, index: slice | Tensor) -> Self:
        """Return the terms of some rows."""
        return type(self)(*(None if x_N is None else x_N[index] for x_N in vars(self).values()))

    def live_rows(self) -> Tensor | None:
        """Return the indices of rows with a non-zero (or NaN) gradient; None means all rows."""
        reached = [
            (x_N != 0) if x_N.ndim == 1 else (x_N != 0).any(1)
            for name, x_N in vars(self).items()
            if name.startswith("grad_") and x_N is not None
        ]
        live_N = torch.stack(reached).any(0)
        index = live_N.nonzero().squeeze(1)
        return None if index.numel() == live_N.numel() else index


@dataclass(frozen=True)
class RowBackward(_Backward):
    """The saved softmax and the incoming gradients; the entropy fields are None if entropy has no gradient."""

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
    ) -> Self:
        """Pair the kept rows' softmax with autograd's gradients for all tokens, times `scale`; any may be None."""
        lse_N, entropy_N = softmax
        grad_logprob_T, grad_entropy_T = (*grads, None)[:2]
        grad_logprob_N, grad_entropy_N = (
            None if grad_T is None else rows.select(grad_T.reshape(-1)) * scale
            for grad_T in (grad_logprob_T, grad_entropy_T)
        )
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(lse_N if grad_entropy_N is None else grad_entropy_N)
        return cls(lse_N, grad_logprob_N, None if grad_entropy_N is None else entropy_N, grad_entropy_N)


def spans(total: int, step: int) -> Iterator[slice]:
    """Yield consecutive spans of at most `step`."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def row_blocks(x_NV: Tensor) -> Iterator[slice]:
    """Yield each block's span of rows."""
    elements = _CPU_BLOCK if x_NV.device.type == "cpu" else _DEVICE_BLOCK
    return spans(x_NV.shape[0], max(1, elements // max(x_NV.shape[1], 1)))


def _scratch_block(x_NV: Tensor) -> Tensor:
    """Return an uninitialised block [n, V] in the accumulation dtype."""
    height = next(row_blocks(x_NV), slice(0, 0)).stop
    return x_NV.new_empty(height, x_NV.shape[1], dtype=accumulation_dtype(x_NV.dtype))


def add_blocks_(out_NV: Tensor, term_NV: Tensor) -> None:
    """Add a 16-bit matrix to a float32 one."""
    scratch_nV = _scratch_block(out_NV)
    for rows in row_blocks(out_NV):
        out_NV[rows].add_(scratch_nV[: rows.stop - rows.start].copy_(term_NV[rows]))


@cache
def _triton_kernels() -> Any:
    """Return the kernel module, or None without Triton; it is imported on first use, since the import is slow."""
    if find_spec("triton") is None:
        return None
    from nemo_rl_mcore.ops import _triton_kernels

    return _triton_kernels


def _kernels_for(logits_NV: Tensor) -> Any:
    """Return the kernels if they support these logits: on CUDA, contiguous columns, not float64."""
    fits = logits_NV.is_cuda and logits_NV.stride(1) == 1 and logits_NV.dtype != torch.float64
    return _triton_kernels() if fits else None


def _at_targets(logits_NV: Tensor, target_N: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return a mask of the targets in the slice, a valid index [N, 1] for all, and the scaled float64 logits there.

    The last value is `scale` * log2(e), rounded: it turns differences of logits into powers of two.
    """
    width = logits_NV.shape[1]
    held_N = (target_N >= 0) & (target_N < width)
    index_N1 = target_N.clamp(0, width - 1).unsqueeze(1)
    target_logit_N = logits_NV.gather(1, index_N1).squeeze(1).double() * scale
    base2 = float(torch.tensor(scale * _LOG2_E, dtype=accumulation_dtype(logits_NV.dtype)))
    return held_N, index_N1, target_logit_N, base2


def slice_statistics(logits_NV: Tensor, target_N: Tensor, with_entropy: bool, scale: float = 1.0) -> Tensor:
    """Return the statistics [F, N] of `scale` times one slice of the logits."""
    if logits_NV.shape[1] == 0:  # a rank with padding alone contributes the merge of no slices
        return merge_statistics(empty_statistics(0, logits_NV, with_entropy))
    if (kernels := _kernels_for(logits_NV)) is not None:
        return kernels.slice_statistics(logits_NV, target_N, with_entropy, scale)
    (stats_FN,) = empty_statistics(1, logits_NV, with_entropy)
    held_N, _, target_logit_N, base2 = _at_targets(logits_NV, target_N, scale)
    stats_FN[1] = torch.where(held_N, target_logit_N, 0.0)
    scratch, power_scratch = _scratch_block(logits_NV), _scratch_block(logits_NV) if with_entropy else None
    for rows in row_blocks(logits_NV):
        work_nV = scratch[: rows.stop - rows.start]
        wide_nV = logits_NV[rows] if logits_NV.dtype == work_nV.dtype else work_nV.copy_(logits_NV[rows])
        max_n = wide_nV.amax(1).double()
        shift_n = (max_n * base2).to(work_nV.dtype)
        exponent_nV = torch.add(-shift_n.unsqueeze(1), wide_nV, alpha=base2, out=work_nV)
        out_nV = work_nV if power_scratch is None else power_scratch[: work_nV.shape[0]]
        power_nV = torch.exp2(exponent_nV, out=out_nV)
        total_n = power_nV.sum(1).double()
        rounding_n = (shift_n - max_n * base2) / _LOG2_E
        stats_FN[0, rows] = total_n.log() + max_n * scale + rounding_n
        if with_entropy:
            # H = log(sum e) - sum(e * log e) / sum(e): centred on the maximum, large logits do not cancel.
            dot_n = power_nV.mul_(exponent_nV).sum(1).double() / _LOG2_E
            stats_FN[2, rows] = total_n.log() - dot_n / total_n
    return stats_FN


def logits_gradient(
    logits_NV: Tensor, target_N: Tensor, rows: RowBackward, out_NV: Tensor, scale: float = 1.0
) -> Tensor:
    """Write the gradient with respect to a slice of `scale` times the logits into `out_NV`, which may be the logits.

    With the incoming gradients g of the row's log-probability and e of its entropy H:
    dL/dz_v = g * 1[v = target] - p_v * (g + e * (log p_v + H)).
    """
    if logits_NV.numel() == 0:
        return out_NV
    if (kernels := _kernels_for(logits_NV)) is not None and out_NV.stride(1) == 1:
        return kernels.logits_gradient(logits_NV, target_N, rows, out_NV, scale)
    held_N, index_N1, target_logit_N, base2 = _at_targets(logits_NV, target_N, scale)
    wide = accumulation_dtype(logits_NV.dtype)
    exact_shift_N = rows.lse_N * (base2 / scale)
    shift_N = exact_shift_N.to(wide)
    # The row's factors correct the change in p that rounding the shift makes.
    correction_N = torch.exp2(shift_N - exact_shift_N)
    grad_N = rows.grad_logprob_N * correction_N.to(rows.grad_logprob_N.dtype)
    grad_entropy_N, power_scratch = None, None
    if rows.entropy_N is not None and rows.grad_entropy_N is not None:
        # The entropy's gradient holds log p beside the entropy.
        entropy_N = rows.entropy_N + correction_N.log().to(grad_N.dtype)
        grad_entropy_N = rows.grad_entropy_N * correction_N.to(grad_N.dtype)
        grad_N = grad_N + grad_entropy_N * entropy_N
        power_scratch = _scratch_block(logits_NV)
    in_place = out_NV.dtype == wide
    scratch = out_NV if in_place else _scratch_block(logits_NV)
    for block in row_blocks(logits_NV):
        work_nV = out_NV[block] if in_place else scratch[: block.stop - block.start]
        wide_nV = logits_NV[block] if logits_NV.dtype == wide else work_nV.copy_(logits_NV[block])
        log2_p_nV = torch.add(-shift_N[block].unsqueeze(1), wide_nV, alpha=base2, out=work_nV)
        if grad_entropy_N is None or power_scratch is None:
            log2_p_nV.exp2_().mul_(-grad_N[block].unsqueeze(1))
        else:
            p_nV = torch.exp2(log2_p_nV, out=power_scratch[: log2_p_nV.shape[0]])
            factor_n1 = (grad_entropy_N[block] / -_LOG2_E).unsqueeze(1)
            log2_p_nV.mul_(factor_n1).sub_(grad_N[block].unsqueeze(1)).mul_(p_nV)
        if not in_place:
            out_NV[block].copy_(work_nV)
    log_p_N = target_logit_N - rows.lse_N
    at_target_N = -rows.grad_logprob_N * torch.expm1(log_p_N)
    if rows.entropy_N is not None and rows.grad_entropy_N is not None:
        at_target_N = at_target_N - log_p_N.exp() * rows.grad_entropy_N * (log_p_N + rows.entropy_N)
    place = torch.arange(target_N.shape[0], device=target_N.device), index_N1.squeeze(1)
    # Not scatter_, which copies the whole of a 16-bit matrix on CPU.
    return out_NV.index_put_(place, torch.where(held_N, at_target_N.to(out_NV.dtype), out_NV[place]))


def take_out(logits_nv: Tensor, place: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Take the logits at (rows, columns), at most K per row, out of a tile.

    Returns them times `scale` in float64, and the statistics [F, n] of the rest. In the tile, they are replaced by a
    finite logit that adds nothing to a sum of real ones.
    """
    taken = logits_nv[place].double() * scale
    logits_nv[place] = max(torch.finfo(logits_nv.dtype).min, NEGLIGIBLE)
    row_p = place[0].reshape(-1)
    taken_n = row_p.new_zeros(logits_nv.shape[0]).index_add_(0, row_p, torch.ones_like(row_p))
    stats_Fn = slice_statistics(logits_nv, torch.full_like(taken_n, -1), False, scale)
    of_nothing_Fn = merge_statistics(stats_Fn.new_empty(0, *stats_Fn.shape))
    return taken, torch.where(taken_n < logits_nv.shape[1], stats_Fn, of_nothing_Fn)


def add_logits(stats_FN: Tensor, logit_NK: Tensor) -> Tensor:
    """Merge a slice's statistics with individual logits, each treated as a one-column slice."""
    slices_KFN = stats_FN.new_zeros(logit_NK.shape[1], *stats_FN.shape)
    slices_KFN[:, 0] = logit_NK.t()
    return merge_statistics(torch.cat([stats_FN.unsqueeze(0), slices_KFN]))


@dataclass(frozen=True)
class SplitSoftmax:
    """The softmax over the whole vocabulary, in float64: K logits, and the tail of all others."""

    logprob_NK: Tensor
    lse_N: Tensor
    tail_lse_N: Tensor
    tail_logmass_N: Tensor

    @classmethod
    def of(cls, logit_NK: Tensor, tail_FN: Tensor) -> Self:
        """Join the two parts; an empty tail has the log-sum-exp -inf."""
        lse_N = add_logits(tail_FN, logit_NK)[0]
        return cls(logit_NK - lse_N.unsqueeze(1), lse_N, tail_FN[0], tail_FN[0] - lse_N)


@dataclass(frozen=True)
class SplitBackward(_Backward):
    """The saved softmax, and the incoming gradients times the logits' factor."""

    logprob_NK: Tensor
    tail_lse_N: Tensor
    tail_logmass_N: Tensor
    grad_logprob_NK: Tensor
    grad_tail_N: Tensor

    def outside_and_inside(self) -> tuple[RowBackward, Tensor]:
        """Return the gradients for the tail's logits (as a softmax over the tail alone) and for the K logits.

        With the log t of the tail's mass, q_v = p_v / exp(t), the sum G of the log-probabilities' gradients g_k and the
        gradient g_t of t, the tail's is dL/dz_v = -q_v * (G exp(t) + g_t expm1(t)): with p_v, a factor exp(-t) would
        overflow for a small tail. The K logits' is dL/dz_k = g_k - p_k * (G + g_t): written as
        -g_k expm1(log p_k) - p_k (G - g_k + g_t), it keeps its digits for p_k close to one.
        """
        grad_NK, logprob_NK = self.grad_logprob_NK, self.logprob_NK
        total_N, mass_N = grad_NK.sum(1), self.tail_logmass_N.exp()
        tail_N = total_N * mass_N + self.grad_tail_N * torch.expm1(self.tail_logmass_N)
        others_NK = grad_NK.sum(1, keepdim=True) - grad_NK + self.grad_tail_N.unsqueeze(1)
        inside_NK = -grad_NK * torch.expm1(logprob_NK) - logprob_NK.exp() * others_NK
        return RowBackward(self.tail_lse_N, tail_N), inside_NK
