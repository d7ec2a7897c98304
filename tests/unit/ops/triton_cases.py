"""The Triton kernels in Triton's interpreter, against the eager passes they replace on CUDA.

Run by test_triton_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET set.
"""

import pytest
import torch

from nemo_rl_mcore.ops import _elementwise
from nemo_rl_mcore.ops import _triton_kernels as kernels
from nemo_rl_mcore.ops._softmax import RowBackward


@pytest.fixture(autouse=True)
def _several_blocks_a_row(monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 64)


def problem(width: int, dtype: torch.dtype, spread: float):
    noise = torch.Generator().manual_seed(width)
    wide = torch.randn(6, width + 3, generator=noise).mul(spread).to(dtype)
    target = torch.tensor([0, width - 1, width // 2, -1, width, width + 70])  # the last three lie elsewhere
    return wide[:, :width], target


CASES = [(1, 1.0), (63, 3.0), (64, 40.0), (200, 3.0), (200, 40.0)]


@pytest.mark.parametrize(("width", "spread"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
def test_statistics(width, spread, dtype, with_entropy):
    logits, target = problem(width, dtype, spread)
    expected = _elementwise.slice_statistics(logits.clone(), target, with_entropy, 0.7)
    actual = kernels.slice_statistics(logits, target, with_entropy, 0.7)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("width", "spread"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(width, spread, dtype, with_entropy, in_place):
    logits, target = problem(width, dtype, spread)
    logits = logits.clone()
    stats = _elementwise.slice_statistics(logits, target, True, 0.7).float()
    grad = torch.linspace(-1, 2, 6)
    rows = RowBackward(stats[0] + 0.1, grad)
    if with_entropy:
        rows = RowBackward(stats[0] + 0.1, grad, stats[2], grad.flip(0))
    expected = _elementwise.logits_gradient(logits, target, rows, torch.empty_like(logits), 0.7)
    out = logits if in_place else torch.empty_like(logits)
    actual = kernels.logits_gradient(logits, target, rows, out, 0.7)
    assert actual is out
    tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=2e-6 if dtype == torch.float32 else 1e-3
    )


def test_no_rows():
    logits, target = torch.empty(0, 5), torch.empty(0, dtype=torch.long)
    assert kernels.slice_statistics(logits, target, True, 1.0).shape == (3, 0)
