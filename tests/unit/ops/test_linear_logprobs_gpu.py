"""The fused kernel on CUDA: float32 logits of 16-bit products, by Triton kernels and by the eager passes."""

import pytest
import torch

from nemo_rl_mcore.ops import _elementwise
from nemo_rl_mcore.ops.linear_logprobs import (
    LinearLogprobsOptions,
    fused_linear_logprobs,
    linear_logprobs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["triton", "eager"])
def passes(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(_elementwise, "_kernels_for", lambda logits: None)
    elif _elementwise._triton_kernels() is None:
        pytest.skip("Triton is not installed")


def results(function, dtype, inputs, frozen=False, **kwargs):
    hidden, weight = (x.to(dtype).requires_grad_() for x in inputs[:2])
    weight.requires_grad_(not frozen)
    out = function(hidden, weight, inputs[2], temperature=0.7, **kwargs)
    outputs = out if isinstance(out, tuple) else (out,)
    grad = torch.sin(torch.arange(inputs[2].numel(), device="cuda")).view_as(inputs[2])
    sum((x * torch.where(grad > 0.9, 0.0, grad)).sum() for x in outputs).backward()
    return [x.double() for x in (*outputs, hidden.grad, *(() if frozen else (weight.grad,)))]


@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("chunk_size", [None, 100], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matches_float64(passes, dtype, chunk_size, frozen, with_entropy):
    noise = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 1, 64, generator=noise, device="cuda").to(dtype)
    weight = (torch.randn(3000, 64, generator=noise, device="cuda") / 4).to(dtype)
    targets = torch.randint(0, 2990, (300, 1), generator=noise, device="cuda")
    inputs = (hidden, weight, targets)
    options = LinearLogprobsOptions(vocab_size=2990, logit_scale=0.8, chunk_size=chunk_size)
    kwargs = {"with_entropy": with_entropy, "options": options, "frozen": frozen}
    expected = results(linear_logprobs, torch.float64, inputs, **kwargs)
    actual = results(fused_linear_logprobs, dtype, inputs, **kwargs)
    grads = 5e-3 if dtype == torch.bfloat16 else 2e-6
    for value, reference in zip(actual[: 1 + with_entropy], expected, strict=False):
        torch.testing.assert_close(value, reference, rtol=0, atol=2e-5)  # float32 logits, whatever the inputs
    for value, reference in zip(actual[1 + with_entropy :], expected[1 + with_entropy :], strict=True):
        assert float((value - reference).norm() / reference.norm()) <= grads
