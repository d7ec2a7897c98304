"""The unfused log-probabilities on one rank; several ranks are in tests/distributed."""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import fused_linear_logprobs
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs


def plain(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen * mask, -(logp.exp() * logp).sum(-1) * mask


def problem(dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(2, 7, 40, generator=noise)).to(dtype).requires_grad_()
    return logits, torch.randint(0, 40, (2, 7), generator=noise), torch.arange(14).view(2, 7) % 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_matches_log_softmax(dtype, tolerance, temperature):
    logits, targets, mask = problem(dtype)
    reference = logits.detach().double().requires_grad_()
    keep = (mask != 0).double()
    expected = plain(reference, targets, temperature, keep)
    actual = vocab_parallel_logprobs(logits, targets, temperature=temperature, mask=mask, with_entropy=True)
    alone = vocab_parallel_logprobs(logits, targets, temperature=temperature, mask=mask)
    assert torch.equal(alone, actual[0])
    weights = torch.sin(torch.arange(14.0, dtype=torch.float64)).view(2, 7)
    (expected_grad,) = torch.autograd.grad(((expected[0] - 0.4 * expected[1]) * weights).sum(), reference)
    (grad,) = torch.autograd.grad(((actual[0] - 0.4 * actual[1]) * weights).sum(), logits)
    for a, e in zip((*actual, grad), (*expected, expected_grad), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance)
    assert bool((actual[0][mask == 0] == 0).all() & (actual[1][mask == 0] == 0).all())
    assert not grad[mask == 0].any()


def test_padding_takes_no_probability_and_gets_no_gradient():
    logits, targets, _ = problem()
    out = vocab_parallel_logprobs(logits, targets % 30, vocab_size=30)
    torch.testing.assert_close(out, vocab_parallel_logprobs(logits[..., :30], targets % 30))
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert bool(grad[..., :30].any())
    assert not grad[..., 30:].any()


def test_gradient_through_one_output_only():
    logits, targets, _ = problem()
    for index in (0, 1):
        out = vocab_parallel_logprobs(logits, targets, temperature=0.7, with_entropy=True)
        (grad,) = torch.autograd.grad(out[index].sum(), logits)
        reference = plain(logits, targets, 0.7, torch.ones(2, 7))
        (expected,) = torch.autograd.grad(reference[index].sum(), logits)
        torch.testing.assert_close(grad, expected)


def test_fused_and_unfused_agree():
    noise = torch.Generator().manual_seed(6)
    hidden = torch.randn(5, 2, 8, generator=noise)
    weight = torch.randn(40, 8, generator=noise)
    targets = torch.randint(0, 40, (5, 2), generator=noise)
    fused = fused_linear_logprobs(hidden, weight, targets, temperature=0.7, with_entropy=True)
    unfused = vocab_parallel_logprobs(hidden @ weight.t(), targets, temperature=0.7, with_entropy=True)
    torch.testing.assert_close(fused, unfused, rtol=0, atol=2e-6)


def test_16_bit_logits_give_float32_results_and_16_bit_gradients():
    logits, targets, mask = problem(torch.bfloat16)
    out = vocab_parallel_logprobs(logits, targets, mask=mask)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert out.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    expected, _ = plain(logits.detach().double(), targets, 1.0, mask != 0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_large_logits_and_empty_masks():
    logits = torch.tensor([[120.0, -120.0, 119.0], [-120.0, -120.0, -119.0]], dtype=torch.float64)
    out = vocab_parallel_logprobs(logits.float(), torch.tensor([1, 2]))
    expected = [-240 - math.log1p(math.exp(-1)), -math.log1p(2 * math.exp(-1))]
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-7, atol=1e-7)
    logits.requires_grad_()
    empty = vocab_parallel_logprobs(logits, torch.tensor([-100, 77]), mask=torch.zeros(2))
    (grad,) = torch.autograd.grad(empty.sum(), logits)
    assert not empty.any()
    assert not grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"targets": torch.zeros(2, 6, dtype=torch.long)}, "must agree"),
        ({"mask": torch.ones(7, 2)}, "must agree"),
        ({"targets": torch.full((2, 7), 40)}, "target 40 is outside"),
        ({"vocab_size": 41}, "vocab_size is 41"),
    ],
)
def test_mistakes_are_named(change, message):
    logits, targets, mask = problem()
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(**({"logits": logits, "targets": targets, "mask": mask} | change))
