"""The numbers of a step from the results of one `train` or several."""

import math

import pytest
import torch
from algorithm_fakes import train_result

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.algorithm import join_results, rollout_metrics, train_metrics
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.losses.base import MetricKind
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


def test_one_result_joined_is_itself():
    result = train_result()
    joined = join_results([result])
    assert torch.equal(joined.pop("grad_norm"), result.pop("grad_norm"))
    assert joined == result


def test_results_are_joined_in_order_as_if_one_call_had_made_all_steps():
    first, second = train_result(), train_result(("the loss is nan", None))
    second["all_mb_metrics"] |= {"loss": [9.0, 5.0], "global_valid_toks": [20.0, 40.0], "lr": [0.2, 0.1]}
    joined = join_results([first, second])
    assert joined["all_mb_metrics"]["loss"] == [0.5, 1.5, 9.0, 5.0]
    assert joined["grad_norm"].tolist() == [1, 2, 1, 2]
    assert joined["skip_reasons"] == [None, None, "the loss is nan", None]
    assert joined["update_successful"] is False
    metrics = train_metrics(joined, "value")
    assert metrics["value/loss"] == pytest.approx((0.5 * 30 + 1.5 * 10 + 9 * 20 + 5 * 40) / 100)
    assert metrics["value/lr"] == 0.1
    assert metrics["value/num_valid_samples"] == 80
    assert (metrics["value/probs_ratio_min"], metrics["value/probs_ratio_max"]) == (0.25, 3.0)
    assert metrics["value/update_successful"] == 0


@pytest.mark.parametrize(
    ("kind", "there", "expected"),
    [
        (MetricKind.MIN, [4.0, 2.0], 2.0),
        (MetricKind.MAX, [4.0, 2.0], 4.0),
        (MetricKind.NONE, [4.0, 2.0], 6.0),
    ],
)
@pytest.mark.parametrize("missing_first", [True, False])
def test_a_metric_that_one_result_lacks_changes_nothing_there(kind, there, expected, missing_first):
    has, lacks = train_result(), train_result()
    has["all_mb_metrics"]["extra"], has["metric_kinds"]["extra"] = there, kind
    joined = join_results([lacks, has] if missing_first else [has, lacks])
    assert len(joined["all_mb_metrics"]["extra"]) == 4
    assert train_metrics(joined)["train/extra"] == expected


def test_the_extrema_of_nothing_and_the_norms_of_empty_steps_are_left_out():
    result = train_result((None, EMPTY_STEP))
    metrics = train_metrics(result)
    assert "train/values_min" not in metrics
    assert metrics["train/grad_norm"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert train_metrics(train_result((EMPTY_STEP, EMPTY_STEP)))["train/grad_norm"] == 0


def test_the_spread_of_rewards_is_told_over_all_and_within_groups():
    batch = BatchedDataDict(
        rewards=torch.tensor([9.0, 9.0, 9.0, 9.0]),
        environment_rewards=torch.tensor([0.0, 1.0, 2.0, 2.0]),
        prompt_index=torch.tensor([5, 5, 7, 7]),
        token_mask=torch.tensor([[0.0, 1, 0], [0, 1, 1], [0, 1, 0], [0, 1, 1]]),
        input_lengths=torch.tensor([2, 3, 2, 3]),
        finished=torch.tensor([True, True, True, False]),
    )
    found = rollout_metrics(Rollout(batch, [], []))
    spread = {name: found[f"train/reward_{name}"] for name in ("min", "max", "std", "std_within_groups")}
    assert spread == pytest.approx(
        {"min": 0, "max": 2, "std": math.sqrt(2.75 / 3), "std_within_groups": math.sqrt(0.5) / 2}
    )
    assert (found["train/max_gen_tokens_per_sample"], found["train/mean_gen_tokens_per_sample"]) == (2, 1.5)
    assert found["train/truncation_rate"] == 0.25


def test_the_memory_of_each_model_is_told_under_its_name():
    result = train_result() | {"peak_memory_gib": 1.5}
    assert train_metrics(result)["performance/peak_memory_gib"] == 1.5
    assert train_metrics(result, "value")["performance/value_peak_memory_gib"] == 1.5
