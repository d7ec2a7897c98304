from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import DPOLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import DPOLossFn, LossType, MetricKind, TokenOutputs

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]


@pytest.fixture
def pairs(make_batch: BatchMaker) -> tuple[torch.Tensor, BatchedDataDict]:
    """Three pairs; the second one is dropped, and every row has a token."""
    c, data = make_batch(rows=6)
    data["token_mask"][:, 2] = 1
    data["sample_mask"] = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.float64)
    data["reference_policy_logprobs"] = data["reference_policy_logprobs"].roll(-1, dims=1)
    return c, data


def textbook(c: torch.Tensor, data: BatchedDataDict, cfg: dict[str, Any], n_seq: float) -> dict[str, Any]:
    """Sentence by sentence from the paper."""
    beta = cfg.get("reference_policy_kl_penalty", 0.05)
    names = ("preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean")
    sums = dict.fromkeys(names, 0.0)
    count = 0

    def of_row(row: int, *, likelihood: bool, average: bool) -> float:
        total, tokens = c.new_zeros(()), 0
        for t in range(c.shape[1]):
            if data["token_mask"][row, t + 1]:
                ref = 0.0 if likelihood else data["reference_policy_logprobs"][row, t].item()
                total, tokens = total + c[row, t] - ref, tokens + 1
        return total / tokens if average else total

    for pair in range(len(c) // 2):
        if not data["sample_mask"][2 * pair]:
            continue
        count += 1
        average = cfg.get("preference_average_log_probs", False)
        chosen, rejected = (of_row(2 * pair + i, likelihood=False, average=average) for i in (0, 1))
        sums["preference_loss"] += torch.nn.functional.softplus(-beta * (chosen - rejected))
        sums["accuracy"] += float(chosen > rejected)
        sums["rewards_chosen_mean"] += chosen
        sums["rewards_rejected_mean"] += rejected
        if cfg.get("sft_loss_weight", 0):
            sums["sft_loss"] -= of_row(
                2 * pair, likelihood=True, average=cfg.get("sft_average_log_probs", False)
            )
    result = {name: value / (n_seq / 2) for name, value in sums.items()}
    result["loss"] = (
        cfg.get("preference_loss_weight", 1.0) * result["preference_loss"]
        + cfg.get("sft_loss_weight", 0.0) * result["sft_loss"]
    )
    return result | {"num_valid_samples": count}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"reference_policy_kl_penalty": 0.7},
    {"preference_average_log_probs": True},
    {"sft_loss_weight": 0.3},
    {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 2.0},
    {"sft_loss_weight": 1.0, "preference_loss_weight": 0.0},
]


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
def test_the_textbook(cfg: dict[str, Any], pairs: tuple[torch.Tensor, BatchedDataDict]):
    c, data = pairs
    loss, metrics = DPOLossFn(cfg)(c, data, 4, 23)
    expected = textbook(c, data, cfg, 4)
    (gradient,) = torch.autograd.grad(loss, c)
    (expected_gradient,) = torch.autograd.grad(expected["loss"], c)
    torch.testing.assert_close(gradient, expected_gradient)
    expected = {name: float(torch.as_tensor(value).detach()) for name, value in expected.items()}
    assert metrics == pytest.approx(expected, abs=1e-7)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)


def test_an_odd_number_of_rows_is_refused(pairs: tuple[torch.Tensor, BatchedDataDict]):
    c, data = pairs
    with refused("rows-per-sample", 5):
        DPOLossFn({})(c[:5], data.slice(0, 5), 4, 23)


def test_what_it_says_of_itself(pairs: tuple[torch.Tensor, BatchedDataDict]):
    c, data = pairs
    loss_fn = DPOLossFn(DPOLossConfig(), use_fused_linear_logprobs=True)
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    assert loss_fn.rows_per_sample == 2
    assert loss_fn.use_fused_linear_logprobs
    kinds = {name: metric.kind for name, metric in loss_fn.sums(TokenOutputs(c), data).metrics.items()}
    assert kinds.pop("num_valid_samples") is MetricKind.NONE
    assert set(kinds.values()) == {MetricKind.SEQUENCES}


@pytest.mark.parametrize("masked", [0, 1])
def test_a_pair_with_one_row_masked_follows_its_chosen_row(
    masked: int, pairs: tuple[torch.Tensor, BatchedDataDict]
):
    c, data = pairs
    sample_mask = torch.ones_like(data["sample_mask"])
    sample_mask[2 + masked] = 0.0
    half = BatchedDataDict(data, sample_mask=sample_mask)
    both = BatchedDataDict(data, sample_mask=torch.ones_like(sample_mask))
    if masked == 0:
        both["sample_mask"][2:4] = 0.0
    assert DPOLossFn({})(c, half, 4, 23)[1] == DPOLossFn({})(c, both, 4, 23)[1]
