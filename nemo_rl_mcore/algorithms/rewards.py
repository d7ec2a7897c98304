"""Rewards before they become advantages: scaling, length penalties, and the statistics of groups.

A group is the rows with equal prompt ids; prompt ids are [B] numbers or [B,P] token rows.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


def scale_rewards(
    rewards: Tensor, *, source_min: float, source_max: float, target_min: float, target_max: float
) -> Tensor:
    """Return [B] rewards clamped to the source interval and mapped linearly onto the target interval."""
    if source_max <= source_min:
        raise ValueError(f"source_max: {source_max} must be greater than source_min: {source_min}")
    share = (rewards.clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return target_min + share * (target_max - target_min)


def penalize_overlong(
    rewards: Tensor,
    response_lengths: Tensor,
    *,
    overlong_buffer_length: int,
    overlong_buffer_penalty: float,
    max_response_length: int,
) -> Tensor:
    """Return [B] rewards less DAPO's soft length penalty (https://arxiv.org/abs/2503.14476).

    The penalty grows linearly from 0, overlong_buffer_length tokens before max_response_length, through
    overlong_buffer_penalty at max_response_length, and keeps growing beyond it.
    """
    if overlong_buffer_length < 1:
        raise ValueError(f"overlong_buffer_length must be at least 1, got {overlong_buffer_length}")
    excess = (response_lengths - (max_response_length - overlong_buffer_length)).clamp(min=0)
    return rewards - excess / overlong_buffer_length * overlong_buffer_penalty


@dataclass(frozen=True)
class GroupStatistics:
    """Per row, in fp64: the mean and the unbiased standard deviation of the rewards it is compared with."""

    baseline: Tensor
    std: Tensor


def group_numbers(prompt_ids: Tensor) -> Tensor:
    """Return [B] the number of each row's group, counted from 0."""
    _, numbers = cast("tuple[Tensor, Tensor]", torch.unique(prompt_ids, dim=0, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    return numbers


def group_statistics(prompt_ids: Tensor, rewards: Tensor, *, leave_one_out: bool) -> GroupStatistics:
    """Return the statistics of each row's group, without the row itself when `leave_one_out`.

    A group of one has its own reward as baseline; a deviation that is not defined is 0. Computed in fp64,
    where the sums of a group of equal fp32 rewards are exact and their deviation is exactly 0.
    """
    rewards = rewards.to(torch.float64)
    groups = group_numbers(prompt_ids)
    own = torch.ones_like(rewards) if leave_one_out else torch.zeros_like(rewards)
    count = _group_sum(torch.ones_like(rewards), groups) - own
    divisor = count.clamp(min=1)
    mean = (_group_sum(rewards, groups) - own * rewards) / divisor
    mean_of_squares = (_group_sum(rewards.square(), groups) - own * rewards.square()) / divisor
    variance = (mean_of_squares - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    std = torch.where(count > 1, variance.sqrt(), 0.0)
    return GroupStatistics(baseline=torch.where(count > 0, mean, rewards), std=std)


def rows_with_signal(prompt_ids: Tensor, rewards: Tensor) -> Tensor:
    """Return [B] bool: whether the row's group has two different rewards, as dynamic sampling asks."""
    groups = group_numbers(prompt_ids)
    start = torch.zeros_like(rewards)
    largest = start.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    smallest = start.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    return (largest != smallest)[groups]


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, groups, values)[groups]
