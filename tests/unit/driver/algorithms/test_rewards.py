import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_mcore.config.algorithm import GRPOConfig, RewardScalingConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import group_statistics
from nemo_rl_mcore.driver.rollouts.scheduler import EQUAL_REWARDS, Draw, scale_rewards, shape_rewards


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GROUPS = st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=12)


def test_scaling_maps_the_interval_and_clamps_outside_of_it():
    rewards = doubles([-9, 0, 1, 2, 9])
    keys = {"source_min": 0.0, "source_max": 2.0, "target_min": -1.0, "target_max": 3.0}
    assert scale_rewards(RewardScalingConfig(enabled=True, **keys), rewards).tolist() == [-1, -1, 1, 3, 3]
    assert rewards.tolist() == [-9, 0, 1, 2, 9]


def test_the_overlong_penalty_by_hand():
    # max 10, buffer 4: free up to 6, then a quarter of 2.0 per token, and on beyond 10.
    section = shaping(overlong_buffer_length=4, overlong_buffer_penalty=2.0, max_response_length=10)
    lengths = torch.tensor([0, 6, 7, 8, 10, 12])
    batch = BatchedDataDict(
        rewards=torch.ones(6),
        token_mask=(torch.arange(12) < lengths.unsqueeze(1)).float(),
        sample_mask=torch.ones(6),
        finished=torch.ones(6),
    )
    shape_rewards(section, batch)
    assert batch["rewards"].tolist() == [1, 1, 0.5, 0, -1, -2]


def shaping(**keys):
    return GRPOConfig.model_validate(
        {
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "max_num_steps": 1,
            "use_dynamic_sampling": True,
            "reward_shaping": {"enabled": True, **keys},
        }
    )


def test_an_overlong_buffer_needs_a_length():
    with pytest.raises(ValidationError, match=r"reward_shaping\.overlong_buffer_length"):
        shaping(overlong_buffer_length=0, max_response_length=4)


def exact_statistics(peers: list[Fraction]) -> tuple[Fraction, Fraction]:
    """Mean and unbiased variance; the variance of less than two is 0."""
    mean = sum(peers, Fraction()) / len(peers)
    squares = sum(((peer - mean) ** 2 for peer in peers), Fraction())
    return mean, squares / max(len(peers) - 1, 1)


TENTHS = st.integers(-10_000, 10_000)
# Few different values in a group, as environments give them: the others of a row are often equal.
GROUP_OF_TENTHS = st.lists(TENTHS, min_size=1, max_size=3).flatmap(
    lambda values: st.lists(st.sampled_from(values), min_size=2, max_size=64)
)


@settings(deadline=None)
@given(
    groups=st.lists(GROUP_OF_TENTHS | st.lists(TENTHS, min_size=2, max_size=64), min_size=1, max_size=4),
    leave_one_out=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@example(groups=[[1] * 7 + [10]], leave_one_out=True, random=None)
def test_group_statistics_are_exact_arithmetic_of_decimal_rewards(groups, leave_one_out, random):
    rows = [(number, tenths) for number, group in enumerate(groups) for tenths in group]
    if random is not None:
        random.shuffle(rows)
    ids = torch.tensor([number for number, _ in rows])
    rewards = torch.tensor([tenths for _, tenths in rows]) / 10
    found = group_statistics(ids, rewards, leave_one_out=leave_one_out)
    exact = [(number, Fraction(reward)) for (number, _), reward in zip(rows, rewards.tolist(), strict=True)]
    for row, (number, _) in enumerate(exact):
        peers = [r for i, (n, r) in enumerate(exact) if n == number and not (leave_one_out and i == row)]
        mean, variance = exact_statistics(peers)
        assert found.baseline[row].item() == pytest.approx(float(mean), rel=1e-14, abs=1e-13)
        std = found.std[row].item()
        assert std == pytest.approx(math.sqrt(variance), rel=1e-13, abs=0.0)


def test_many_small_groups_take_little_memory():
    """A batch of 2^18 rows: what grows with the square of the batch would not fit into any machine."""
    rewards = torch.arange(2**18) % 8 / 10
    found = group_statistics(torch.arange(2**18) // 8, rewards, leave_one_out=True)
    expected = group_statistics(torch.zeros(8), rewards[:8], leave_one_out=True)
    assert torch.equal(found.std.reshape(-1, 8), expected.std.expand(2**15, 8))
    assert torch.equal(found.baseline.reshape(-1, 8), expected.baseline.expand(2**15, 8))


def test_a_group_is_the_rows_with_equal_prompt_tokens():
    tokens = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
    rewards = doubles([1, 5, 3, 9])
    assert group_statistics(tokens, rewards, leave_one_out=False).baseline.tolist() == [2, 7, 2, 7]
    assert group_statistics(tokens, rewards, leave_one_out=True).baseline.tolist() == [3, 9, 1, 5]


def deviates(groups, rewards):
    return group_statistics(groups, rewards, leave_one_out=False).std != 0


@given(GROUPS)
def test_only_groups_with_two_different_rewards_have_a_signal(rows: list[tuple[int, int]]):
    found = deviates(torch.tensor([g for g, _ in rows]), doubles([r for _, r in rows]))
    assert found.tolist() == [len({r for g, r in rows if g == group}) > 1 for group, _ in rows]


def test_a_signal_is_not_a_matter_of_rounding():
    rewards = torch.tensor([0.1] * 7 + [0.1, math.nextafter(0.1, 1)], dtype=torch.float64)
    assert not deviates(torch.zeros(8), rewards[:8]).any()
    assert deviates(torch.zeros(9), rewards).all()


@pytest.mark.parametrize(
    ("rewards", "signal"), [([1.0, 1.0], False), ([1.0, 0.0], True), ([0.0, 0.0], False)]
)
def test_dynamic_sampling_judges_what_the_environment_gave_and_not_the_length(rewards, signal):
    """NeMo RL's unshaped_total_reward: the second answer is longer, and is penalised for it."""
    section = shaping(overlong_buffer_length=2, max_response_length=4)
    mask = torch.tensor([[0.0, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
    batch = BatchedDataDict(
        rewards=torch.tensor(rewards),
        token_mask=mask,
        sample_mask=torch.ones(2),
        finished=torch.ones(2),
        prompt_index=torch.zeros(2, dtype=torch.long),
        sample_index=torch.arange(2),
    )
    assert Draw(None, None, 1, 2, section).unused_for(batch) == (None if signal else EQUAL_REWARDS)
