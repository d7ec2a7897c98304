"""The unfused log-probabilities on one rank; several ranks are in tests/distributed."""

import math

import pytest
import torch
from plain_filters import filtered_logprobs, kept_tokens

from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs


def plain(logits, targets, temperature, mask):
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen * mask, -(logp.exp() * logp).sum(-1) * mask


def problem(dtype=torch.float64):
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


FILTERS = {
    "k": {"top_k": 7},
    "p": {"top_p": 0.8},
    "k, then p": {"top_k": 7, "top_p": 0.8},
    "one token": {"top_p": 1e-6},
    "all tokens": {"top_k": 99},
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filtered_tokens_have_no_probability_and_no_gradient(dtype, tolerance, temperature, filters):
    logits, targets, mask = problem(getattr(torch, dtype))
    with torch.no_grad():
        logits[:, 2:5] = logits[:, 2:5].round()  # ties, also of the k-th largest
    reference = logits.detach().double().requires_grad_()
    keys = {"temperature": temperature, "mask": mask, "with_entropy": True} | filters
    actual = vocab_parallel_logprobs(logits, targets, **keys)
    expected = [
        torch.where(mask != 0, one, 0.0)
        for one in filtered_logprobs(reference, targets, temperature, **filters)
    ]
    # What a loss makes of the two outputs: no gradient of a token outside.
    losses = [
        torch.where(one.isfinite(), one, 0.0).sin().sum() - 0.4 * of.sum() for one, of in (actual, expected)
    ]
    (grad,), (expected_grad,) = (
        torch.autograd.grad(loss, x) for loss, x in zip(losses, (logits, reference), strict=True)
    )
    assert torch.equal(actual[0].isinf(), expected[0].isinf())
    assert bool(actual[0].isinf().any()) == (filters is not FILTERS["all tokens"])
    for a, e in zip(actual, expected, strict=True):
        a, e = (one.double().nan_to_num(neginf=0.0) for one in (a, e))
        torch.testing.assert_close(a, e, rtol=0, atol=min(tolerance, 1e-5))
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=tolerance)
    assert not grad[~kept_tokens(reference, temperature, **filters)].any()


def test_nan_is_not_filtered_out():
    logits, targets, _ = problem()
    with torch.no_grad():
        logits[0, 0, 3] = torch.nan
    out = vocab_parallel_logprobs(logits, targets, top_k=3, top_p=0.9)
    assert out[0, 0].isnan()
    assert not out.flatten()[1:].isnan().any()


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
