"""ClippedPGLossFn: examples computed by hand, and what it refuses."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, LossType, MetricKind, TokenOutputs

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]

IS = {"use_importance_sampling_correction": True}
TIS = IS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.3}
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


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).log().requires_grad_()


NO_KL = {"reference_policy_kl_penalty": 0.0}


def test_clipping_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 against [0.8, 1.2], advantages +1, -1, +1, -1.
    data = tiny(advantages=[[1, -1, 1, -1]], prev_logprobs=[[math.log(0.4)] * 4])
    c = logs(0.6, 0.6, 0.2, 0.2)
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL))(c, data, 1, 4)
    assert loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics["probs_ratio_clamped"] == pytest.approx(1.0)
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == pytest.approx((0.5, 1.5))
    assert (metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"]) == pytest.approx(
        (0.8, 1.2)
    )
    (gradient,) = torch.autograd.grad(loss, c)
    torch.testing.assert_close(gradient, torch.tensor([[0, 1.5, -0.5, 0]], dtype=torch.float64) / 4)


def test_dual_clip_by_hand():
    # A ratio of 5 with advantage -2 would cost 10; the dual clip stops it at 3 * 2, without a gradient.
    data = tiny(advantages=[[-2]], prev_logprobs=[[math.log(0.1)]])
    c = logs(0.5)
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_c=3.0, **NO_KL))(c, data, 1, 1)
    assert loss.item() == pytest.approx(6.0)
    assert torch.autograd.grad(loss, c)[0].item() == 0


def test_sequence_level_loss_weighs_rows_equally():
    # Row means -1 and -4 under one long and one short row; token level would give (-3 - 4) / 4.
    data = tiny(advantages=[[1, 1, 1], [4, 0, 0]])
    data["token_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    per_row, _ = ClippedPGLossFn(ClippedPGLossConfig(token_level_loss=False, **NO_KL))(zeros, data, 2, 4)
    per_token, _ = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL))(zeros, data, 2, 4)
    assert per_row.item() == pytest.approx(-2.5)
    assert per_token.item() == pytest.approx(-7 / 4)


def test_gspo_ratio_is_the_geometric_mean_of_the_row():
    # exp(mean(log 4, log 1)) = 2, clipped to 1.2.
    data = tiny(advantages=[[1, 1]], prev_logprobs=[[math.log(0.2), math.log(0.5)]])
    cfg = ClippedPGLossConfig(sequence_level_importance_ratios=True, token_level_loss=False, **NO_KL)
    loss, metrics = ClippedPGLossFn(cfg)(logs(0.8, 0.5), data, 1, 2)
    assert metrics["probs_ratio"] == pytest.approx(2.0, rel=1e-7)
    assert loss.item() == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k1", lambda q: 1 - q), ("k2", lambda q: q * q / 2 - q), ("k3", lambda q: -q)]
)
def test_kl_gradient_includes_the_sampling_probability(kind: str, gradient: Callable[[float], float]):
    # d/dc of E_c[k(r - c)] for a sampled token is k + dk/dc; for k3 that is exactly c - r.
    data = tiny(advantages=[[0.0]], reference_policy_logprobs=[[-0.7]])
    c = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    cfg = ClippedPGLossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type=kind)
    loss, metrics = ClippedPGLossFn(cfg)(c, data, 1, 1)
    assert torch.autograd.grad(loss, c)[0].item() == pytest.approx(0.5 * gradient(0.8), rel=1e-7)
    assert loss.item() == pytest.approx(0.5 * metrics["kl_penalty"])


def test_importance_weights_by_hand():
    # p - g gives weights 2, 1 and 1/4 on advantages 1, with the policy unchanged since p.
    c = logs(0.4, 0.5, 0.1)
    data = tiny(
        advantages=[[1, 1, 1]],
        prev_logprobs=c.tolist(),
        generation_logprobs=[[math.log(0.2), math.log(0.5), math.log(0.4)]],
    )

    def run(**keys: Any) -> tuple[float, float, float | None]:
        loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL, **keys))(c, data, 1, 3)
        return loss.item(), metrics["sampling_importance_ratio"], metrics.get("is_oob_ratio")

    bounds = {"truncated_importance_sampling_ratio": 1.5, "truncated_importance_sampling_ratio_min": 0.5}
    assert run() == (pytest.approx(-1), pytest.approx(3.25 / 3), None)
    assert run(**IS) == (pytest.approx(-3.25 / 3), pytest.approx(3.25 / 3), None)
    for kind, weights, share in (
        ("tis", (1.5, 1, 0.5), 2 / 3),
        ("icepop", (0, 1, 0), 2 / 3),
        ("seq-mask-tis", (2, 1, 0.25), 0.0),  # the geometric mean, 0.5 ** (1/3), is inside
    ):
        expected = sum(weights) / 3
        found = run(**IS, **bounds, truncated_importance_sampling_type=kind)
        assert found == pytest.approx((-expected, expected, share), rel=1e-7, abs=1e-9), kind


def test_infinite_and_undefined_weights_count_as_zero():
    data = tiny(
        advantages=[[1, 1, 1]],
        prev_logprobs=[[-1, -math.inf, -1]],
        generation_logprobs=[[-math.inf, -math.inf, -1]],
    )
    cfg = ClippedPGLossConfig(disable_ppo_ratio=True, **IS, **NO_KL)
    c = torch.full((1, 3), -2.0, dtype=torch.float64, requires_grad=True)
    loss, metrics = ClippedPGLossFn(cfg)(c, data, 1, 3)
    assert loss.item() == pytest.approx(2 / 3)
    assert metrics["sampling_importance_ratio"] == pytest.approx(1 / 3)
    assert torch.isfinite(torch.autograd.grad(loss, c)[0]).all()


def test_a_kl_weight_that_overflows_has_no_gradient():
    data = tiny(advantages=[[0.0]], generation_logprobs=[[-2000.0]], reference_policy_logprobs=[[-1.0]])
    c = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    cfg = ClippedPGLossConfig(use_on_policy_kl_approximation=True, reference_policy_kl_penalty=1.0)
    loss, _ = ClippedPGLossFn(cfg)(c, data, 1, 1)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, c)[0].item() == 0


def test_metrics_between_training_and_generation_by_hand():
    data = tiny(advantages=[[0.0]], prev_logprobs=[[math.log(0.6)]], generation_logprobs=[[math.log(0.2)]])
    _, metrics = ClippedPGLossFn(ClippedPGLossConfig(**NO_KL))(logs(0.4), data, 1, 1)
    assert metrics["token_mult_prob_error"] == pytest.approx(3)
    assert metrics["gen_kl_error"] == pytest.approx(3 - 1 - math.log(3))
    assert metrics["policy_kl_error"] == pytest.approx(1 / 3 - 1 + math.log(3))
    halves = [1.5 - 1 - math.log(1.5), 0.5 - 1 - math.log(0.5)]  # 0.6 and 0.2 against their mean 0.4
    assert metrics["js_divergence_error"] == pytest.approx(sum(halves) / 2)
    assert metrics["approx_entropy"] == pytest.approx(-2 * math.log(0.4))


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


@pytest.mark.parametrize(
    ("variant", "key", "setting"),
    [
        ({}, "token_mask", "every loss"),
        ({}, "sample_mask", "every loss"),
        ({}, "advantages", "policy gradient"),
        ({}, "prev_logprobs", "force_on_policy_ratio"),
        (IS, "generation_logprobs", "use_importance_sampling_correction"),
        ({"use_on_policy_kl_approximation": True}, "generation_logprobs", "use_on_policy_kl_approximation"),
        ({}, "generation_logprobs", "token_mult_prob_error"),
        ({}, "reference_policy_logprobs", "reference_policy_kl_penalty: 0.01"),
    ],
)
def test_a_missing_key_is_named_with_the_setting_that_needs_it(
    variant: dict[str, Any], key: str, setting: str, make_batch: BatchMaker
):
    c, data = make_batch()
    del data[key]
    with pytest.raises(ValueError, match=key) as error:
        ClippedPGLossFn(ClippedPGLossConfig(**variant))(c, data, 1, 1)
    assert setting in str(error.value)


@pytest.mark.parametrize(
    ("variant", "key"),
    [
        (NO_KL, "reference_policy_logprobs"),
        ({"use_kl_in_reward": True}, "reference_policy_logprobs"),
        ({"force_on_policy_ratio": True}, "prev_logprobs"),
    ],
)
def test_a_key_that_no_setting_needs_may_be_absent(variant: dict[str, Any], key: str, make_batch: BatchMaker):
    c, data = make_batch()
    expected = ClippedPGLossFn(ClippedPGLossConfig(**variant))(c, data, 1, 1)
    del data[key]
    assert ClippedPGLossFn(ClippedPGLossConfig(**variant))(c, data, 1, 1)[1] == expected[1]


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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"sequence_level_importance_ratios": True},
            ("sequence_level_importance_ratios", "token_level_loss"),
        ),
        ({"use_cispo": True, "disable_ppo_ratio": True}, ("use_cispo", "disable_ppo_ratio")),
        ({"use_cispo": True, "force_on_policy_ratio": True}, ("use_cispo", "force_on_policy_ratio")),
        ({"use_cispo": True} | GSPO, ("use_cispo", "sequence_level_importance_ratios")),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, ("use_cispo", "ratio_clip_c")),
        ({"use_cispo": True} | SEQUENCE, ("use_cispo", "token_level_loss")),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
            ("truncated_importance_sampling_type", "use_importance_sampling_correction"),
        ),
        (
            IS | {"truncated_importance_sampling_type": "tis"},
            ("truncated_importance_sampling_type", "truncated_importance_sampling_ratio"),
        ),
        (
            TIS | {"truncated_importance_sampling_type": "icepop"},
            ("icepop", "truncated_importance_sampling_ratio_min"),
        ),
        (
            TIS | {"truncated_importance_sampling_type": "seq-mask-tis"},
            ("seq-mask-tis", "truncated_importance_sampling_ratio_min"),
        ),
    ],
)
def test_a_forbidden_combination_is_refused_by_both_names(keys: dict[str, Any], named: tuple[str, str]):
    with pytest.raises(ValueError, match=named[0]) as error:
        ClippedPGLossFn(keys)
    assert named[1] in str(error.value)
