# pyright: basic, reportArgumentType=false
# Triton's type hints exclude plain numbers for constexpr arguments, and cover nothing else.
"""The two elementwise passes as Triton kernels: each reads its slice of the logits once.

Their twins in `_softmax` read it once per operator. Both kernels compute in float32; statistics are stored in float64.

Shapes: N token rows, V a slice of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # columns per step of a program


@triton.jit
def _statistics_kernel(
    logits_ptr, row_stride, target_ptr, out_ptr, rows, width, scale,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: log-sum-exp, target's logit and, from sums of e = exp(z - maximum), the entropy.

    Every lane keeps its own running maximum, so that the loop needs no exchange between lanes.
    """
    row = tl.program_id(0).to(tl.int64)
    lane_max = tl.full(
        (BLOCK,), -3.0e38, tl.float32
    )  # finite, so that differences of empty lanes are not NaN
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    lane_dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        grown = tl.where(inside, tl.maximum(lane_max, z), lane_max)
        # A lane's sum is centred on its old maximum; an empty lane has nothing to shift.
        shift = tl.where(lane_sum > 0, lane_max - grown, 0.0)
        kept = tl.exp(shift)
        centred = tl.where(inside, z - grown, 0.0)
        e = tl.where(inside, tl.exp(centred), 0.0)
        if WITH_ENTROPY:
            lane_dot = kept * (lane_dot + lane_sum * shift) + e * centred
        lane_sum = kept * lane_sum + e
        lane_max = grown
    maximum = tl.max(lane_max, 0)
    shift = tl.where(lane_sum > 0, lane_max - maximum, 0.0)
    kept = tl.where(lane_sum > 0, tl.exp(shift), 0.0)
    total = tl.sum(kept * lane_sum, 0).to(tl.float64)
    tl.store(out_ptr + row, maximum.to(tl.float64) + tl.log(total))
    target = tl.load(target_ptr + row)
    held = (target >= 0) & (target < width)
    target_logit = (
        tl.load(logits_ptr + row * row_stride + target, mask=held, other=0.0).to(tl.float32) * scale
    )
    tl.store(out_ptr + rows + row, target_logit.to(tl.float64))
    if WITH_ENTROPY:
        dot = tl.sum(kept * (lane_dot + lane_sum * shift), 0).to(tl.float64)
        tl.store(out_ptr + 2 * rows + row, tl.log(total) - dot / total)


@triton.jit
def _gradient_kernel(
    logits_ptr, row_stride, out_ptr, out_stride, target_ptr, lse_ptr, grad_ptr, entropy_ptr, grad_entropy_ptr,
    width, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of a row; see `_softmax.logits_gradient` for the formula."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    log_p = z * scale - tl.load(lse_ptr + row).to(tl.float32)
    grad = tl.load(grad_ptr + row)
    factor = grad
    if WITH_ENTROPY:
        factor = grad + tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    one_hot = tl.where(column == tl.load(target_ptr + row), grad, 0.0)
    value = one_hot - tl.exp(log_p) * factor
    out = out_ptr + row * out_stride + column
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


def slice_statistics(logits_NV: Tensor, target_N: Tensor, with_entropy: bool, scale: float) -> Tensor:
    """As `_softmax.slice_statistics`, for a non-empty slice."""
    rows, width = logits_NV.shape
    stats_FN = logits_NV.new_empty(3 if with_entropy else 2, rows, dtype=torch.float64)
    if rows > 0:
        _statistics_kernel[(rows,)](
            logits_NV, logits_NV.stride(0), target_N, stats_FN, rows, width, scale, with_entropy, _block(width)
        )  # fmt: skip
    return stats_FN


def logits_gradient(logits_NV: Tensor, target_N: Tensor, rows: Any, out_NV: Tensor, scale: float) -> Tensor:
    """As `_softmax.logits_gradient`, for a non-empty slice; rows: a `RowBackward`."""
    count, width = logits_NV.shape
    block = _block(width)
    lse_N, entropy_N, grad_entropy_N = rows.lse_N, rows.entropy_N, rows.grad_entropy_N
    _gradient_kernel[(count, triton.cdiv(width, block))](
        logits_NV, logits_NV.stride(0), out_NV, out_NV.stride(0),
        target_N, lse_N, rows.grad_logprob_N.contiguous(),
        # Placeholders if there is no entropy: the kernel then reads neither.
        lse_N if entropy_N is None else entropy_N,
        lse_N if grad_entropy_N is None else grad_entropy_N.contiguous(),
        width, scale, entropy_N is not None, block,
    )  # fmt: skip
    return out_NV


def _block(width: int) -> int:
    return min(_BLOCK, 1 << (width - 1).bit_length())
