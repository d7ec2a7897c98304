"""Compare log-probabilities and steps of several ranks with those of one."""

import pytest


def assert_equal_to_one(found, single_rank):
    """Compare what each rank found, and see that the steps changed something; each: (weights, before, steps, after)."""
    _, logprobs, steps, after = single_rank
    for _, own_logprobs, own_steps, own_after in found:
        assert own_logprobs == pytest.approx(logprobs, abs=2e-5)
        for own, reference in zip(own_steps, steps, strict=True):
            assert own.keys() == reference.keys()
            for name in reference:
                assert own[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name
        assert own_after == pytest.approx(after, abs=2e-4)
    assert abs(after - logprobs).max() > 1e-2
