import math

import pytest
import torch

from nemo_rl_mcore.losses.kl import finite_exp, kl_estimate


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_mean_estimate_is_the_divergence_and_its_gradient(kind: str):
    # Over all outcomes of c, weighted by c: E[k1] = E[k3] = KL(c || r) exactly, and with the score-function
    # factor the gradient of the estimates' mean is the gradient of their true expectation.
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    r = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64), 0)
    c = torch.log_softmax(logits, 0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    estimates = kl_estimate(c, r, kind, weight=finite_exp(c - c.detach()))
    sampled = (c.exp().detach() * estimates).sum()
    exact = (c.exp() * kl_estimate(c, r, kind)).sum()
    torch.testing.assert_close(sampled, exact)
    torch.testing.assert_close(gradient(sampled), gradient(exact))
    if kind != "k2":
        divergence = (c.exp() * (c - r)).sum()
        torch.testing.assert_close(exact, divergence)
        torch.testing.assert_close(gradient(exact), gradient(divergence))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e4])
def test_finite_exp_is_zero_with_a_zero_gradient_where_exp_is_not_finite(value: float):
    x = torch.tensor([value, 1.0], dtype=torch.float64, requires_grad=True)
    result = finite_exp(x)
    assert result.tolist() == pytest.approx([0.0, math.e])
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == pytest.approx([0.0, math.e])
