"""ClippedPGLossFn: examples computed by hand, and what it refuses."""

import math
from collections.abc import Callable

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, LossType, MetricKind, TokenOutputs

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]

SEQUENCE = {"token_level_loss": False}
GSPO = SEQUENCE | {"sequence_level_importance_ratios": True}


def counts(data: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return data["sample_mask"].sum(), mask.sum()


def tiny(**columns: list[list[float]]) -> BatchedDataDict:
    rows, width = len(columns["advantages"]), len(columns["advantages"][0])
    zeros = torch.zeros(rows, width + 1, dtype=torch.float64)
    data = BatchedDataDict(
        token_mask=torch.ones(rows, width + 1),
        sample_mask=torch.ones(rows),
        prev_logprobs=zeros,
        generation_logprobs=zeros,
        reference_policy_logprobs=zeros,
    )
    for key, values in columns.items():
        inner = torch.tensor(values, dtype=torch.float64)
        data[key] = torch.nn.functional.pad(inner, (1, 0))
    return data


def test_a_kl_weight_that_overflows_has_no_gradient():
    data = tiny(advantages=[[0.0]], generation_logprobs=[[-2000.0]], reference_policy_logprobs=[[-1.0]])
    c = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    cfg = ClippedPGLossConfig(use_on_policy_kl_approximation=True, reference_policy_kl_penalty=1.0)
    loss, _ = ClippedPGLossFn(cfg)(c, data, 1, 1)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, c)[0].item() == 0


def test_a_batch_without_a_valid_token_is_zero_with_empty_extrema(make_batch: BatchMaker):
    c, data = make_batch()
    data["sample_mask"] = torch.zeros(5)
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig())(c, data, *counts(data))
    (gradient,) = torch.autograd.grad(loss, c)
    assert loss.item() == 0
    assert not gradient.any()
    for name in ("probs_ratio", "probs_ratio_clamped"):
        assert (metrics.pop(f"{name}_min"), metrics.pop(f"{name}_max")) == (math.inf, -math.inf)
    assert set(metrics.values()) == {0.0}


def test_the_numbers_do_not_depend_on_the_form_of_counts_and_masks(make_batch: BatchMaker):
    c, data = make_batch(dtype=torch.float32)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig())
    seqs, toks = counts(data)
    loss, metrics = loss_fn(c, data, seqs, toks)
    data["token_mask"], data["sample_mask"] = data["token_mask"].bool(), data["sample_mask"].long()
    for form in (int, float, lambda n: n.double(), lambda n: n.long()):
        again, again_metrics = loss_fn(c, data, form(seqs), form(toks))
        assert again.dtype is torch.float32
        torch.testing.assert_close(again, loss)
        assert again_metrics == pytest.approx(metrics)
    assert {type(value) for value in metrics.values()} == {float}


def test_shapes_that_do_not_fit_are_named(make_batch: BatchMaker):
    c, data = make_batch()
    with refused("column-shape", "logprobs", [5, 5], [5, 6]):
        ClippedPGLossFn(ClippedPGLossConfig())(c[:, 1:], data, 1, 1)
    data["advantages"] = torch.zeros(5, 1)
    with refused("column-shape", "advantages"):
        ClippedPGLossFn(ClippedPGLossConfig())(c, data, 1, 1)


def test_the_entropy_bonus_needs_the_entropy(make_batch: BatchMaker):
    c, data = make_batch()
    plain, bonus = (ClippedPGLossFn(ClippedPGLossConfig(entropy_coef=x)) for x in (0.0, 0.1))
    assert (plain.needs_entropy, bonus.needs_entropy) == (False, True)
    with pytest.raises(ValueError, match=r"entropy_coef: 0\.1"):
        bonus(c, data, 1, 1)
    assert "entropy" not in plain(c, data, 1, 1)[1]


def test_the_entropy_bonus_has_a_gradient(make_batch: BatchMaker):
    c, data = make_batch()
    entropy = data["entropy"][:, 1:].clone().requires_grad_()
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(entropy_coef=0.1))(c, data, *counts(data), entropy=entropy)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.1 * mask / mask.sum())


def test_the_level_of_the_loss_names_its_denominator(make_batch: BatchMaker):
    c, data = make_batch()
    for keys, level, kind in (
        ({}, LossType.TOKEN_LEVEL, MetricKind.TOKENS),
        (GSPO, LossType.SEQUENCE_LEVEL, MetricKind.SEQUENCES),
    ):
        loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**keys))
        metrics = loss_fn.sums(TokenOutputs(c), data).metrics
        assert loss_fn.loss_type is level
        assert {metrics[name].kind for name in ("loss", "kl_penalty")} == {kind}
        assert metrics["approx_entropy"].kind is MetricKind.TOKENS


def test_a_forbidden_combination_is_refused_without_a_recipe():
    with pytest.raises(ValueError, match=r"use_cispo.*disable_ppo_ratio"):
        ClippedPGLossFn({"use_cispo": True, "disable_ppo_ratio": True})
