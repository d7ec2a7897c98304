import math

import pytest
import torch
from refusals import assert_holds

from nemo_rl_mcore.config import GenerationConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.mismatch import (
    Mismatch,
    MismatchError,
    compare_with_engine,
    correction_metrics,
    table_of_batch,
)
from nemo_rl_mcore.driver.rollouts.transcript import Pace, age_metrics, pace_metrics

HALF, DOUBLE = math.log(0.5), math.log(2.0)


def batch(errors, token_mask=None, sample_mask=None):
    """Rows whose generation log-probabilities are `errors` above those of training; column 0 counts for nothing."""
    difference = torch.tensor(errors)
    rows, columns = difference.shape
    computed = torch.full((rows, columns), -1.5)
    return BatchedDataDict(
        prev_logprobs=computed,
        generation_logprobs=computed + difference,
        token_mask=torch.tensor(token_mask) if token_mask else torch.ones(rows, columns),
        sample_mask=torch.tensor(sample_mask) if sample_mask else torch.ones(rows),
        prompt_index=torch.arange(rows) + 10,
        sample_index=torch.arange(rows),
    )


def measured(batch):
    return Mismatch.of(batch, table_of_batch(batch))


def check(step, batch, config):
    found = compare_with_engine(step, batch, table_of_batch(batch), config)
    return found.metrics(config.mismatch_threshold)


def threshold(action, value=1.5):
    return GenerationConfig(max_new_tokens=1, mismatch_threshold=value, mismatch_action=action)


def means(found):
    metrics = found.metrics(None)
    return metrics["mismatch/token_mult_prob_error"], metrics["mismatch/gen_kl_error"]


def test_the_measures_of_a_batch_worked_out_by_hand():
    # Tokens 2x too likely, 2x too unlikely, right; and one row that is right throughout.
    found = measured(batch([[9.0, DOUBLE, HALF, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    assert found.per_sequence.tolist() == pytest.approx([5 / 3, 1.0])
    # k3 of q = training - generation: exp(q) - 1 - q.
    expected = (0.5 - 1 + DOUBLE) + (2 - 1 - DOUBLE)
    assert means(found) == pytest.approx(((2 + 2 + 1 + 3) / 6, expected / 6))


def test_what_is_not_trained_on_does_not_count_even_when_it_is_infinite():
    left_out = batch(
        [[0.0, DOUBLE, math.inf], [0.0, 5.0, 5.0], [0.0, 3.0, 3.0]],
        token_mask=[[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
        sample_mask=[1.0, 0.0, 1.0],
    )
    found = measured(left_out)
    assert found.per_sequence.tolist() == pytest.approx([2.0, 1.0, 1.0])
    assert means(found)[0] == pytest.approx(2.0)


def test_a_batch_without_trained_tokens_agrees():
    found = measured(batch([[0.0, 1.0]], sample_mask=[0.0]))
    assert found.metrics(1.5) == {
        "mismatch/token_mult_prob_error": 1.0,
        "mismatch/gen_kl_error": 0.0,
        "mismatch/max_seq_mult_prob_error": 1.0,
        "mismatch/seqs_above_threshold": 0.0,
    }


MISMATCHED = [[0.0, 0.0], [0.0, DOUBLE], [0.0, math.nan], [0.0, 0.1]]


def test_without_a_threshold_it_only_reports():
    rollout = batch(MISMATCHED[:2])
    metrics = check(3, rollout, GenerationConfig(max_new_tokens=1))
    assert metrics["mismatch/max_seq_mult_prob_error"] == pytest.approx(2.0)
    assert "mismatch/seqs_above_threshold" not in metrics
    assert rollout["sample_mask"].tolist() == [1, 1]


def test_mask_leaves_out_the_responses_above_the_threshold_and_those_that_are_not_a_number():
    rollout = batch(MISMATCHED, sample_mask=[1.0, 1.0, 1.0, 0.5])
    metrics = check(3, rollout, threshold("mask"))
    assert rollout["sample_mask"].tolist() == [1.0, 0.0, 0.0, 0.5]
    assert metrics["mismatch/seqs_above_threshold"] == 0.5


@pytest.mark.parametrize(("action", "kept"), [("warn", [1, 1]), ("mask", [0, 1])])
def test_responses_from_older_weights_are_masked_too_and_else_not_compared(action, kept, capsys):
    rollout = batch([[5.0, 5.0], [0.0, 0.0]])
    rollout["weight_versions"] = torch.tensor([[-1, 2, 2], [-1, 6, 6]])
    check(7, rollout, threshold(action))
    assert rollout["sample_mask"].tolist() == kept
    assert capsys.readouterr().err == ""


def test_stop_ends_the_run_and_names_step_key_and_samples():
    with pytest.raises(MismatchError) as caught:
        check(7, batch(MISMATCHED), threshold("stop"))
    named = "prompt 11 sample 1: 2", "prompt 12 sample 2: nan"
    assert_holds(str(caught.value), "step 7: ", "2 of 4", "policy.generation.mismatch_threshold: 1.5", *named)


def test_warn_says_so_and_trains_on_everything(capsys):
    rollout = batch(MISMATCHED)
    check(7, rollout, threshold("warn"))
    assert capsys.readouterr().err.startswith(
        "step 7: training and generation disagree about 2 of 4 responses"
    )
    assert rollout["sample_mask"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("action", ["warn", "mask", "stop"])
def test_agreement_below_the_threshold_changes_nothing(action, capsys):
    rollout = batch([[5.0, 0.0], [5.0, 0.1]])
    check(1, rollout, threshold(action, 1.2))
    assert rollout["sample_mask"].tolist() == [1, 1]
    assert capsys.readouterr().err == ""


def test_many_rows_are_measured_as_each_of_them_alone():
    noise = torch.Generator().manual_seed(0)
    errors, mask = torch.randn(150, 5, generator=noise), torch.rand(150, 5, generator=noise) > 0.4
    many = batch(
        errors.tolist(), mask.float().tolist(), (torch.rand(150, generator=noise) > 0.1).float().tolist()
    )
    trained = (many["token_mask"] * many["sample_mask"].unsqueeze(1))[:, 1:].sum(1)
    alone = [measured(many.slice(row, row + 1)) for row in range(150)]
    found = measured(many)
    assert found.per_sequence.tolist() == [float(one.per_sequence) for one in alone]
    for number in range(2):
        sums = sum(means(one)[number] * count for one, count in zip(alone, trained.tolist(), strict=True))
        assert means(found)[number] == pytest.approx(sums / float(trained.sum()))


# Ages, importance weights and shares of a step's time


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
