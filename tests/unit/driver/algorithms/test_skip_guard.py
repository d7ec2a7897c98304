import pytest
import torch
from refusals import assert_holds

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.run_checkpoints import SkipGuard, TooManySkippedStepsError
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

NAN = "the loss is nan"


def batch(rewards=(1.0, 0.0, 1.0), **columns):
    return BatchedDataDict(
        prompt_index=torch.tensor([5, 5, 9]),
        sample_index=torch.tensor([0, 1, 0]),
        rewards=torch.tensor(rewards),
        advantages=torch.zeros(3, 4),
        **columns,
    )


def stopped(limit, reasons, **given):
    guard = SkipGuard(limit)
    guard.record(reasons)
    with pytest.raises(TooManySkippedStepsError) as caught:
        guard.stop_if_too_many(12, batch(**given))
    return str(caught.value)


def test_the_run_goes_on_until_the_limit_of_skips_in_a_row():
    guard = SkipGuard(limit=3)
    for reasons in ([NAN], [NAN, None], [NAN], [NAN]):
        guard.record(reasons)
        guard.stop_if_too_many(1, batch())
    assert (guard.total, guard.in_a_row) == (4, 2)
    message = stopped(3, [None, NAN, NAN, "the gradient norm is inf"])
    assert_holds(message, "step 12", 3, "max_consecutive_skips: 3", "inf")


def test_one_applied_step_of_a_rollout_breaks_the_row():
    guard = SkipGuard(limit=2)
    for _ in range(5):
        guard.record([NAN, None])
        guard.stop_if_too_many(1, batch())
    assert guard.total == 5


def test_an_empty_step_neither_counts_nor_breaks_the_row():
    guard = SkipGuard(limit=2)
    guard.record([NAN, EMPTY_STEP, EMPTY_STEP, EMPTY_STEP])
    guard.stop_if_too_many(1, batch())
    assert (guard.total, guard.empty, guard.in_a_row) == (1, 3, 1)


def test_the_samples_that_are_not_finite_are_named_with_the_field():
    message = stopped(1, [NAN], rewards=(1.0, float("nan"), 1.0))
    assert "sample 1 (rewards)" in message
    assert "sample 0" not in message


def test_a_finite_batch_points_to_the_weights_and_names_its_prompts():
    message = stopped(1, [NAN])
    assert_holds(message, "the weights", [5, 9])


def test_a_teacher_that_names_the_whole_vocabulary_leaves_no_mass_and_is_not_blamed():
    no_mass = torch.full((3, 4), -torch.inf)
    message = stopped(1, [NAN], teacher_tail_logmass=no_mass)
    assert "the weights" in message
    message = stopped(1, [NAN], teacher_tail_logmass=no_mass, rewards=(1.0, float("nan"), 1.0))
    assert_holds(message, "prompt 5 ", "sample 1 (rewards)")
    assert "teacher_tail_logmass" not in message


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_mass_that_is_no_logarithm_is_blamed(wrong):
    tail = torch.full((3, 4), -torch.inf)
    tail[2, 1] = wrong
    assert "sample 0 (teacher_tail_logmass)" in stopped(1, [NAN], teacher_tail_logmass=tail)
    named = stopped(1, [NAN], prev_logprobs=-tail.abs())
    assert "sample 0 (prev_logprobs)" in named, "a sampled token has a probability"
