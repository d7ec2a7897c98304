"""Ratios, weights and penalties at their bounds, and where exp holds them no more: what is clipped has no gradient."""

import math

import pytest
import torch

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.losses.base import Masks, MetricKind
from nemo_rl_mcore.losses.clipped_pg import importance_weights
from nemo_rl_mcore.losses.kl import finite_exp, kl_estimate

NO_KL = {"reference_policy_kl_penalty": 0.0}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}
DUAL = {"ratio_clip_c": 3.0}
PLACE = (0, 2)
"""Row and column, in the next-token frame, of the token that is changed."""


def with_token(make_batch, previous, advantage, dtype=torch.float32):
    c, data = make_batch(dtype=dtype)
    row, column = PLACE[0], PLACE[1] + 1
    data["prev_logprobs"][row, column] = previous
    data["advantages"][row, column] = advantage
    return c, data


def loss_and_gradient(keys, c, data):
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL | keys))(c, data, 4, 20)
    return loss, torch.autograd.grad(loss, c)[0]


@pytest.mark.parametrize("previous", [-89.5, -200.0, -1e30])
@pytest.mark.parametrize(
    ("keys", "advantage"),
    [
        ({}, 1.5),
        ({}, 0.0),
        ({"token_level_loss": False}, 1.5),
        (DUAL, 1.5),
        (DUAL, 0.0),
        (DUAL, -1.5),
        ({"ratio_clip_max": 1e6}, 1.5),
    ],
)
def test_a_clipped_token_has_its_clipped_value_and_no_gradient(keys, advantage, previous, make_batch):
    c, data = with_token(make_batch, previous, advantage)
    loss, gradient = loss_and_gradient(keys, c, data)
    # A ratio of e^15 is clipped just as well, and exp holds it.
    _, moderate = with_token(make_batch, c[PLACE].item() - 15, advantage)
    expected, expected_gradient = loss_and_gradient(keys, c, moderate)
    assert loss.item() == expected.item()
    assert torch.equal(gradient, expected_gradient)
    assert gradient[PLACE] == 0
    assert gradient.any()


@pytest.mark.parametrize(("keys", "sign"), [({}, 1.0), (DUAL, 1.0), (DUAL, -1.0)])
@pytest.mark.parametrize("previous", [-1e4, -1e30])
def test_a_clipped_row_has_no_gradient(keys, sign, previous, make_batch):
    c, data = with_token(make_batch, previous, 1.0)
    data["advantages"][PLACE[0]] = sign * data["advantages"][PLACE[0]].abs()
    loss, gradient = loss_and_gradient(GSPO | keys, c, data)
    data["prev_logprobs"][PLACE[0]] = -15.0
    expected, expected_gradient = loss_and_gradient(GSPO | keys, c, data)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not gradient[PLACE[0]].any()
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_negative_advantage_is_not_clipped_from_above():
    """Its loss is -A * ratio: 7e34 is what it is, and what exp cannot hold stays infinite, which skips the step."""
    data = BatchedDataDict(
        token_mask=torch.ones(1, 2),
        sample_mask=torch.ones(1),
        advantages=torch.tensor([[0.0, -2.0]]),
        prev_logprobs=torch.tensor([[0.0, -82.0]]),
        generation_logprobs=torch.zeros(1, 2),
    )
    c = torch.tensor([[-1.0]], requires_grad=True)
    loss, gradient = loss_and_gradient({}, c, data)
    assert loss.item() == pytest.approx(2 * math.exp(81) / 20, rel=1e-4)
    assert gradient.item() == pytest.approx(2 * math.exp(81) / 20, rel=1e-4)
    data["prev_logprobs"][0, 1] = -200.0
    assert loss_and_gradient({}, c, data)[0].item() == math.inf


@pytest.mark.parametrize("clamped_input", [None, 150.0])
def test_the_penalty_of_a_token_that_the_reference_finds_certain_is_clamped_without_a_gradient(
    clamped_input, make_batch
):
    keys = {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": clamped_input}
    for approximation in (False, True):
        c, data = make_batch(dtype=torch.float32)
        data["prev_logprobs"][:, 1:] = c.detach()
        c = c.detach().clone()
        c[PLACE] = -120.0
        data["advantages"][PLACE[0], PLACE[1] + 1] = 0.0
        data["generation_logprobs"][PLACE[0], PLACE[1] + 1] = -119.0
        keys["use_on_policy_kl_approximation"] = approximation
        loss, gradient = loss_and_gradient(keys, c.requires_grad_(), data)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert gradient[PLACE] == 0
        assert gradient.any()


def test_a_penalty_that_is_not_clamped_keeps_its_value_and_gradient():
    c = torch.tensor([-100.0, -3.0], dtype=torch.float64, requires_grad=True)
    for bound in (None, 1e60):
        estimate = kl_estimate(c, torch.zeros(2, dtype=torch.float64), "k3", output_clamp=bound)
        assert estimate.tolist() == pytest.approx([math.exp(100) - 101, math.exp(3) - 4])
        slope = torch.autograd.grad(estimate.sum(), c)[0]
        assert slope.tolist() == pytest.approx([1 - math.exp(100), 1 - math.exp(3)])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_an_impossible_token_of_the_reference_is_clamped_without_a_gradient(kind):
    c = torch.tensor([-3.0], requires_grad=True)
    weight = finite_exp(c - c.detach())
    estimate = kl_estimate(c, torch.tensor([-math.inf]), kind, output_clamp=10.0, weight=weight)
    assert estimate.item() == 10
    assert torch.autograd.grad(estimate, c)[0].item() == 0


CORRECTED = {"use_importance_sampling_correction": True}
TRUNCATED = {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5}
KINDS = ("tis", "icepop", "seq-mask-tis")


def overflow_metrics(keys, c, data):
    return ClippedPGLossFn(ClippedPGLossConfig(**NO_KL | keys))(c, data, 4, 20)[1]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        CORRECTED,
        *(CORRECTED | TRUNCATED | {"truncated_importance_sampling_type": kind} for kind in KINDS),
    ],
    ids=str,
)
def test_tokens_whose_importance_ratio_overflows_are_counted(keys, make_batch):
    c, data = make_batch(dtype=torch.float32)
    assert overflow_metrics(keys, c, data)["is_overflow_ratio"] == 0
    data["prev_logprobs"][0, 2:5] = 0.0
    for column, exponent in enumerate((88.0, 89.0, 500.0), start=2):
        data["generation_logprobs"][0, column] = -exponent
    metrics = overflow_metrics(keys, c, data)
    assert metrics["is_overflow_ratio"] == pytest.approx(2 / 20)
    assert math.isfinite(metrics["sampling_importance_ratio"])
    data["token_mask"][0, 4] = 0
    assert overflow_metrics(keys, c, data)["is_overflow_ratio"] == pytest.approx(1 / 20)
    data["sample_mask"][0] = 0
    assert overflow_metrics(keys, c, data)["is_overflow_ratio"] == 0


def test_a_ratio_of_a_sequence_that_overflows_drops_all_its_tokens(make_batch):
    c, data = make_batch(dtype=torch.float32)
    data["prev_logprobs"][0, 2:4] = 0.0
    data["generation_logprobs"][0, 2:4] = -60.0  # each alone is held
    metrics = overflow_metrics(CORRECTED | GSPO, c, data)
    assert metrics["is_overflow_ratio"] == pytest.approx(data["token_mask"][0, 1:].sum().item() / 20)
    assert overflow_metrics(CORRECTED, c, data)["is_overflow_ratio"] == 0


# Importance weights


RATIOS = [[2.0, 1.0, 0.25], [1.1, 0.9, 5.0], [8.0, 8.0, 8.0]]
MASKS = Masks.of(
    BatchedDataDict(
        token_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
        sample_mask=torch.tensor([1, 1, 0]),
    ),
    torch.float64,
)


def truncated(kind, low, high):
    bounds = {"truncated_importance_sampling_ratio": high, "truncated_importance_sampling_ratio_min": low}
    return ClippedPGLossConfig(**CORRECTED | bounds | {"truncated_importance_sampling_type": kind})


@pytest.mark.parametrize(
    ("low", "high", "tis", "icepop"),
    [
        (1.0, 9.0, [[2, 1, 1], [1.1, 1]], [[2, 1, 0], [1.1, 0]]),
        (0.0, 1.0, [[1, 1, 0.25], [1, 0.9]], [[0, 1, 0.25], [0, 0.9]]),
    ],
)
def test_bounds_are_inclusive(low, high, tis, icepop):
    # exp(log x) may round; 0 and its weight of 1 do not.
    log_ratio = MASKS.keep(torch.tensor(RATIOS, dtype=torch.float64).log(), "ratios")
    for kind, expected in (("tis", tis), ("icepop", icepop)):
        found = importance_weights(truncated(kind, low, high), log_ratio, MASKS)
        shown = [found.weights[b, t].item() for b, t in MASKS.valid.nonzero().tolist()]
        assert shown == pytest.approx([w for row in expected for w in row], rel=1e-7)
        assert found.weights[0, 1].item() == 1
        assert found.out_of_bounds is not None
        assert (found.out_of_bounds.value.item(), found.out_of_bounds.kind) == (2, MetricKind.TOKENS)


def test_a_weight_that_is_not_finite_is_zero_before_the_bounds():
    masks = Masks.of(BatchedDataDict(token_mask=torch.ones(1, 4), sample_mask=torch.ones(1)), torch.float64)
    log_ratio = torch.tensor([[math.inf, math.nan, 0.0]], dtype=torch.float64)
    # The geometric mean leaves those two out, so the row stays.
    for kind, expected in (("tis", [0.5, 0.5, 1]), ("icepop", [0, 0, 1]), ("seq-mask-tis", [0, 0, 1])):
        found = importance_weights(truncated(kind, 0.5, 2.0), log_ratio, masks)
        assert found.weights.tolist() == [expected], kind


# Divergences


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_mean_estimate_is_the_divergence_and_its_gradient(kind):
    # Over all outcomes of c, weighted by c: E[k1] = E[k3] = KL(c || r) exactly, and with the score-function
    # factor the gradient of the estimates' mean is the gradient of their true expectation.
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    r = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64), 0)
    c = torch.log_softmax(logits, 0)

    def gradient(value):
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
def test_finite_exp_is_zero_with_a_zero_gradient_where_exp_is_not_finite(value):
    x = torch.tensor([value, 1.0], dtype=torch.float64, requires_grad=True)
    result = finite_exp(x)
    assert result.tolist() == pytest.approx([0.0, math.e])
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == pytest.approx([0.0, math.e])
