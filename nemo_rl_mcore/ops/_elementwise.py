"""The elementwise passes over logits: their softmax statistics, and their gradient.

Both run in blocks of rows, each read into one float32 scratch block and worked on in place there. On CPU a
block stays in the second-level cache, so that only the first and the last pass touch memory, and nothing as
large as the logits is allocated: memory that large is mapped again each time, and its page faults would cost
as much as the arithmetic.

On CUDA two Triton kernels take their place where Triton is installed.

Shapes: N token rows, V a slice of the vocabulary, n rows of a block, F floats per row. Targets are indices
into the slice; one outside it belongs to another slice.
"""

import math
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nemo_rl_mcore.ops._softmax import RowBackward, accumulation_dtype, empty_statistics, merge_statistics

_LOG2_E = 1 / math.log(2)  # powers of two: on CPU torch's exp2 is up to four times as fast as its exp
_CPU_BLOCK = 1 << 18  # elements: 1 MiB of float32
_DEVICE_BLOCK = 1 << 23  # elsewhere a kernel launch is what has to be paid off


def row_blocks(x_NV: Tensor) -> Iterator[slice]:
    """Yield the spans of rows that make up one block each."""
    elements = _CPU_BLOCK if x_NV.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, elements // max(x_NV.shape[1], 1))
    for start in range(0, x_NV.shape[0], step):
        yield slice(start, min(start + step, x_NV.shape[0]))


def scratch_block(x_NV: Tensor) -> Tensor:
    """Return an uninitialised block [n, V] in the accumulation dtype."""
    height = next(iter(row_blocks(x_NV)), slice(0, 0)).stop
    return x_NV.new_empty(height, x_NV.shape[1], dtype=accumulation_dtype(x_NV.dtype))


def add_blocks_(out_NV: Tensor, term_NV: Tensor) -> None:
    """Add a 16-bit matrix to a float32 one."""
    scratch_nV = scratch_block(out_NV)
    for rows in row_blocks(out_NV):
        out_NV[rows].add_(scratch_nV[: rows.stop - rows.start].copy_(term_NV[rows]))


@cache
def _triton_kernels() -> Any:
    """Return the module of kernels, None without Triton. Imported on first use: it takes a while."""
    if find_spec("triton") is None:
        return None
    from nemo_rl_mcore.ops import _triton_kernels

    return _triton_kernels


def _kernels_for(logits_NV: Tensor) -> Any:
    """Return the kernels if they can take these logits: on CUDA, columns side by side, not float64."""
    fits = logits_NV.is_cuda and logits_NV.stride(1) == 1 and logits_NV.dtype != torch.float64
    return _triton_kernels() if fits else None


def slice_statistics(logits_NV: Tensor, target_N: Tensor, with_entropy: bool, scale: float = 1.0) -> Tensor:
    """Return the statistics [F, N] of `scale` times one slice of the logits (see `_softmax`)."""
    if logits_NV.shape[1] == 0:  # a rank that holds only padding contributes what no slices at all merge to
        return merge_statistics(empty_statistics(0, logits_NV, with_entropy))
    if (kernels := _kernels_for(logits_NV)) is not None:
        return kernels.slice_statistics(logits_NV, target_N, with_entropy, scale)
    (stats_FN,) = empty_statistics(1, logits_NV, with_entropy)
    held_N, _, target_logit_N = _at_targets(logits_NV, target_N, scale)
    stats_FN[1] = torch.where(held_N, target_logit_N, 0.0)
    base2 = _base2_factor(scale, logits_NV.dtype)
    scratch, power_scratch = scratch_block(logits_NV), scratch_block(logits_NV) if with_entropy else None
    for rows in row_blocks(logits_NV):
        work_nV = scratch[: rows.stop - rows.start]
        wide_nV = _widen(logits_NV[rows], work_nV)
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
    """Write the gradient by one slice of `scale` times the logits into `out_NV`, which may be the logits.

    With g and e the incoming gradients of the row's log-probability and entropy H:
    dL/dz_v = g * 1[v = target] - p_v * (g + e * (log p_v + H)).
    The one-hot term has a single entry a row, computed in float32 and put in its place at the end.
    """
    if logits_NV.numel() == 0:
        return out_NV
    if (kernels := _kernels_for(logits_NV)) is not None and out_NV.stride(1) == 1:
        return kernels.logits_gradient(logits_NV, target_N, rows, out_NV, scale)
    held_N, index_N1, target_logit_N = _at_targets(logits_NV, target_N, scale)
    base2 = _base2_factor(scale, logits_NV.dtype)
    exact_shift_N = rows.lse_N * (base2 / scale)
    shift_N = exact_shift_N.to(accumulation_dtype(logits_NV.dtype))
    # What rounding the shift changes in p, the row's factors make good.
    corrected_rows = rows.with_factor_of_p(torch.exp2(shift_N - exact_shift_N))
    in_place = out_NV.dtype == accumulation_dtype(logits_NV.dtype)
    scratch = out_NV if in_place else scratch_block(logits_NV)
    power_scratch = None if rows.entropy_N is None else scratch_block(logits_NV)
    for block in row_blocks(logits_NV):
        work_nV = out_NV[block] if in_place else scratch[: block.stop - block.start]
        wide_nV = _widen(logits_NV[block], work_nV)
        exponent_nV = torch.add(-shift_N[block].unsqueeze(1), wide_nV, alpha=base2, out=work_nV)
        _softmax_gradient_(exponent_nV, corrected_rows.at(block), power_scratch)
        if not in_place:
            out_NV[block].copy_(work_nV)
    place = torch.arange(target_N.shape[0], device=target_N.device), index_N1.squeeze(1)
    at_target_N = _gradient_at_target(target_logit_N - rows.lse_N, rows).to(out_NV.dtype)
    # Not scatter_, which on CPU copies a 16-bit matrix as a whole.
    return out_NV.index_put_(place, torch.where(held_N, at_target_N, out_NV[place]))


def _softmax_gradient_(exponent_nV: Tensor, rows: RowBackward, power_scratch: Tensor | None) -> None:
    """Turn log2 p into the gradient without its one-hot term, in place."""
    if power_scratch is not None and rows.entropy_N is not None and rows.grad_entropy_N is not None:
        p_nV = torch.exp2(exponent_nV, out=power_scratch[: exponent_nV.shape[0]])
        offset_n = rows.grad_logprob_N + rows.grad_entropy_N * rows.entropy_N
        factor_n = rows.grad_entropy_N / -_LOG2_E
        exponent_nV.mul_(factor_n.unsqueeze(1)).sub_(offset_n.unsqueeze(1)).mul_(p_nV)
    else:
        exponent_nV.exp2_().mul_(-rows.grad_logprob_N.unsqueeze(1))


def _gradient_at_target(log_p_N: Tensor, rows: RowBackward) -> Tensor:
    """Return the gradient where the one-hot term is one."""
    grad_N = -rows.grad_logprob_N * torch.expm1(log_p_N)
    if rows.entropy_N is None or rows.grad_entropy_N is None:
        return grad_N
    return grad_N - log_p_N.exp() * rows.grad_entropy_N * (log_p_N + rows.entropy_N)


def _widen(block_nV: Tensor, scratch_nV: Tensor) -> Tensor:
    """Return the logits in the accumulation dtype: the block itself where it already is that."""
    return block_nV if block_nV.dtype == scratch_nV.dtype else scratch_nV.copy_(block_nV)


def _base2_factor(scale: float, dtype: torch.dtype) -> float:
    """Return the factor that makes a logit a power of two, as the accumulation dtype rounds it.

    The rounded factor multiplies differences of logits only, never a large logit by itself.
    """
    return float(torch.tensor(scale * _LOG2_E, dtype=accumulation_dtype(dtype)))


def _at_targets(logits_NV: Tensor, target_N: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return which targets lie in the slice, an index [N, 1] that is safe elsewhere, their scaled logits in float64."""
    width = logits_NV.shape[1]
    held_N = (target_N >= 0) & (target_N < width)
    index_N1 = target_N.clamp(0, width - 1).unsqueeze(1)
    target_logit_N = logits_NV.gather(1, index_N1).squeeze(1)
    return held_N, index_N1, target_logit_N.double() * scale
