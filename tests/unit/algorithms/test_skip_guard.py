import torch

from nemo_rl_mcore.algorithms.skip_guard import SkipGuard
from nemo_rl_mcore.data import BatchedDataDict

APPLIED = {"update_successful": True, "skip_reasons": []}
SKIPPED = {"update_successful": False, "skip_reasons": ["the loss is nan"]}


def batch(rewards=(1.0, 0.0, 1.0)):
    return BatchedDataDict(
        prompt_index=torch.tensor([5, 5, 9]), sample_index=torch.tensor([0, 1, 0]), rewards=torch.tensor(rewards),
        advantages=torch.zeros(3, 4),
    )  # fmt: skip


def test_the_run_goes_on_until_the_limit_of_skips_in_a_row():
    guard = SkipGuard(limit=3)
    outcomes = [SKIPPED, SKIPPED, APPLIED, SKIPPED, SKIPPED]
    assert [guard.check(step, result, batch()) for step, result in enumerate(outcomes)] == [None] * 5
    assert guard.total == 4
    error = guard.check(12, SKIPPED, batch())
    assert "step 12" in str(error)
    assert "3 times in a row" in str(error)
    assert "max_consecutive_skips: 3" in str(error)
    assert "the loss is nan" in str(error)


def test_the_samples_that_are_not_finite_are_named_with_the_field():
    error = SkipGuard(limit=1).check(2, SKIPPED, batch(rewards=(1.0, float("nan"), 1.0)))
    assert "prompt 5 sample 1 (rewards)" in str(error)
    assert "sample 0" not in str(error)


def test_a_finite_batch_points_to_the_weights_and_names_its_prompts():
    error = SkipGuard(limit=1).check(2, SKIPPED, batch())
    assert "weights or the loss" in str(error)
    assert "[5, 9]" in str(error)
