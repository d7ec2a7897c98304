"""Tokens outside of top-k and top-p in the clipped loss: without a gradient, but in the KL penalty, and counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, TokenOutputs
from nemo_rl_mcore.losses.kl import COLUMNS, kl_estimate, sampler_table

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]
LATER, BEFORE, BOTH = (0, 1), (2, 2), (3, 0)
"""Rows and columns of c: outside now, in the pass before, in both; of each batch only the valid ones count."""
NO_KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}


def filtered(make_batch: BatchMaker) -> tuple[TokenOutputs, torch.Tensor, BatchedDataDict]:
    c, data = make_batch()
    unfiltered, c = (c.detach() - 0.2).requires_grad_(), c.detach()
    for row, column in (LATER, BOTH):
        c[row, column] = -torch.inf
    for row, column in (BEFORE, BOTH):
        data["prev_logprobs"][row, column + 1] = -torch.inf
    data["token_mask"][:4] = 1
    return TokenOutputs(c.requires_grad_(), unfiltered=unfiltered), unfiltered, data


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_importance_sampling_correction": True},
        {"use_cispo": True},
        {"disable_ppo_ratio": True},
        {"force_on_policy_ratio": True},
    ],
    ids=str,
)
def test_tokens_outside_have_no_gradient_and_others_keep_theirs(keys: dict[str, Any], make_batch: BatchMaker):
    outputs, _, data = filtered(make_batch)
    loss = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL, **keys))
    sums = loss.sums(outputs, data)
    (gradient,) = torch.autograd.grad(sums.loss, outputs.logprobs)
    assert sums.loss.isfinite()
    assert all(metric.value.isfinite() for metric in sums.metrics.values())
    assert sums.metrics["num_tokens_outside_filters"].value == 3 - keys.get("force_on_policy_ratio", False)
    places = (LATER, BOTH) if keys.get("force_on_policy_ratio") else (LATER, BEFORE, BOTH)
    for row, column in places:
        assert gradient[row, column] == 0
        data["token_mask"][row, column + 1] = 0
    assert gradient.any()
    (expected,) = torch.autograd.grad(loss.sums(outputs, data).loss, outputs.logprobs)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("on_policy", [False, True])
def test_the_kl_penalty_is_of_the_unfiltered_distribution(on_policy: bool, make_batch: BatchMaker):
    outputs, unfiltered, data = filtered(make_batch)
    keys: dict[str, Any] = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    penalised = ClippedPGLossConfig(
        reference_policy_kl_penalty=0.5, use_on_policy_kl_approximation=on_policy, **keys
    )
    found = [
        ClippedPGLossFn(cfg).sums(outputs, data).loss for cfg in (penalised, ClippedPGLossConfig(**NO_KL))
    ]
    generation, reference = (data[f"{name}_logprobs"][:, 1:] for name in ("generation", "reference_policy"))
    weight = torch.exp(unfiltered - (generation if on_policy else unfiltered.detach()))
    counted = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    kl = (weight * kl_estimate(unfiltered, reference, "k3") * counted).sum()
    torch.testing.assert_close(found[0] - found[1], 0.5 * kl)
    expected, gradient = (torch.autograd.grad(one, unfiltered)[0] for one in (0.5 * kl, found[0]))
    torch.testing.assert_close(gradient, expected)


def test_a_token_outside_agrees_with_the_engine():
    training, generation = torch.tensor([[-torch.inf, -1.0]]), torch.tensor([[-3.0, -1.5]])
    found = sampler_table(generation, training, torch.ones(1, 2, dtype=torch.bool), "k3")
    inside = sampler_table(generation[:, 1:], training[:, 1:], torch.ones(1, 1, dtype=torch.bool), "k3")
    exact = torch.tensor([[1.0, 1, 0, 1, 1, 0, 0]], dtype=torch.float64)
    assert torch.equal(found[:, :-1], (inside + exact)[:, :-1])
    assert found[0, COLUMNS.index("ratio_max")] == inside[0, COLUMNS.index("ratio_max")]
