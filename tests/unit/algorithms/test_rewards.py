import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.algorithms.rewards import (
    group_statistics,
    penalize_overlong,
    rows_with_signal,
    scale_rewards,
)


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GROUPS = st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=12)


def test_scaling_maps_the_interval_and_clamps_outside_of_it():
    rewards = doubles([-9, 0, 1, 2, 9])
    keys = {"source_min": 0.0, "source_max": 2.0, "target_min": -1.0, "target_max": 3.0}
    assert scale_rewards(rewards, **keys).tolist() == [-1, -1, 1, 3, 3]
    assert rewards.tolist() == [-9, 0, 1, 2, 9]


@given(st.floats(-5, 5))
def test_scaling_there_and_back_is_the_identity_inside(reward: float):
    there = scale_rewards(doubles([reward]), source_min=-5, source_max=5, target_min=2, target_max=-3)
    back = scale_rewards(there, source_min=-3, source_max=2, target_min=5, target_max=-5)
    assert back.item() == pytest.approx(reward, abs=1e-12)


def test_an_empty_source_interval_is_refused():
    with pytest.raises(ValueError, match=r"source_max: 1.*source_min: 1"):
        scale_rewards(doubles([0]), source_min=1, source_max=1, target_min=0, target_max=1)


def test_the_overlong_penalty_by_hand():
    # max 10, buffer 4: free up to 6, then a quarter of 2.0 per token, and on beyond 10.
    lengths = torch.tensor([0, 6, 7, 8, 10, 12])
    keys = {"overlong_buffer_length": 4, "overlong_buffer_penalty": 2.0, "max_response_length": 10}
    shaped = penalize_overlong(torch.ones(6), lengths, **keys)
    assert shaped.tolist() == [1, 1, 0.5, 0, -1, -2]


def test_an_overlong_buffer_needs_a_length():
    with pytest.raises(ValueError, match="overlong_buffer_length must be at least 1, got 0"):
        penalize_overlong(
            torch.ones(1),
            torch.ones(1),
            overlong_buffer_length=0,
            overlong_buffer_penalty=1.0,
            max_response_length=4,
        )


@given(GROUPS, st.booleans())
def test_group_statistics_are_those_of_the_plain_definition(rows: list[tuple[int, int]], leave_one_out: bool):
    ids, rewards = [i for i, _ in rows], [float(r) for _, r in rows]
    found = group_statistics(torch.tensor(ids), torch.tensor(rewards), leave_one_out=leave_one_out)
    for row, (group, reward) in enumerate(rows):
        peers = [r for i, (g, r) in enumerate(rows) if g == group and not (leave_one_out and i == row)]
        mean = statistics.fmean(peers) if peers else reward
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        assert found.baseline[row].item() == pytest.approx(mean)
        assert found.std[row].item() == pytest.approx(std, abs=1e-7)


@given(st.floats(-1e4, 1e4, width=32), st.integers(1, 32), st.booleans())
def test_equal_rewards_have_exactly_no_deviation(reward: float, members: int, leave_one_out: bool):
    rewards = torch.full((members,), reward)
    found = group_statistics(torch.zeros(members), rewards, leave_one_out=leave_one_out)
    assert not found.std.any()
    assert torch.equal(found.baseline.float(), rewards)


def test_a_group_is_the_rows_with_equal_prompt_tokens():
    tokens = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
    rewards = doubles([1, 5, 3, 9])
    assert group_statistics(tokens, rewards, leave_one_out=False).baseline.tolist() == [2, 7, 2, 7]
    assert group_statistics(tokens, rewards, leave_one_out=True).baseline.tolist() == [3, 9, 1, 5]


@given(GROUPS)
def test_only_groups_with_two_different_rewards_have_a_signal(rows: list[tuple[int, int]]):
    found = rows_with_signal(torch.tensor([g for g, _ in rows]), doubles([r for _, r in rows]))
    assert found.tolist() == [len({r for g, r in rows if g == group}) > 1 for group, _ in rows]


def test_a_signal_is_not_a_matter_of_rounding():
    rewards = torch.tensor([0.1] * 7 + [0.1, math.nextafter(0.1, 1)], dtype=torch.float64)
    assert not rows_with_signal(torch.zeros(8), rewards[:8]).any()
    assert rows_with_signal(torch.zeros(9), rewards).all()
