"""Ages, importance weights and shares of a step's time, computed by hand."""

import math

import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.mismatch import correction_metrics, table_of_batch
from nemo_rl_mcore.driver.rollouts.transcript import Pace, age_metrics, pace_metrics


def test_ages_are_of_tokens_and_mixtures_of_responses():
    versions = torch.tensor([[-1, 3, 3, 4], [-1, 5, 5, -1], [-1, 4, 5, 5]])
    found = age_metrics([BatchedDataDict(weight_versions=versions)], version=5, max_age=2)
    assert found == pytest.approx(
        {
            "async/age_0": 4 / 8,
            "async/age_1": 2 / 8,
            "async/age_2": 2 / 8,
            "async/age_mean": (2 * 1 + 2 * 2) / 8,
            "async/age_max": 2.0,
            "async/mixed_versions": 2 / 3,
        }
    )


def test_importance_weights_are_of_trained_tokens_alone():
    log_ratios = torch.tensor([[9.0, math.log(2.0), 0.0], [9.0, 9.0, 9.0]])
    batch = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        sample_mask=torch.tensor([1.0, 0.0]),
        generation_logprobs=torch.full((2, 3), -1.0),
        prev_logprobs=log_ratios - 1.0,
    )
    found = correction_metrics(table_of_batch(batch))
    assert found["async/ess"] == pytest.approx(9 / (5 * 2))
    assert found["async/importance_ratio_max"] == pytest.approx(2.0)
    assert found["async/behaviour_kl"] == pytest.approx((2 - 1 - math.log(2.0)) / 2, abs=1e-6)
    batch["sample_mask"] = torch.zeros(2)
    assert correction_metrics(table_of_batch(batch)) == {}


def test_shares_are_of_the_steps_time_and_attempts_have_their_reasons():
    pace = Pace(began_at=10.0, trainer_idle_s=1.0, engine_idle_s=3.0, ready=4, in_flight=5)
    assert "async/engine_restarts" not in pace_metrics(pace, now=14.0)
    pace.engine_restarts = 1
    pace.requeued["timeout"] += 2
    pace.dropped["ValueError"] += 1
    found = pace_metrics(pace, now=14.0)
    assert found == {
        "async/trainer_idle": 0.25,
        "async/engine_idle": 0.75,
        "async/buffer_ready": 4.0,
        "async/inflight": 5.0,
        "async/engine_restarts": 1.0,
        "async/requeued/timeout": 2.0,
        "async/dropped/ValueError": 1.0,
    }
