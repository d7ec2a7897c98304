"""Rewards before they become advantages: scaling, length penalties, and the statistics of groups.

A group is the rows with equal prompt ids; prompt ids are [B] numbers or [B,P] token rows. G groups have N rows each.
A row here is an answer: of an episode of several rows one is given, of one that was dropped none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.episode_rows import EpisodeRows
from nemo_rl_mcore.errors import RefusedError


def shape_rewards(section: RolloutConfig, batch: BatchedDataDict) -> None:
    """Scale and penalize `rewards` [B] of scored rows as the section says, row by row.

    What the environment gave is kept as environment_rewards [B]; overlong_filtering clears the sample_mask of responses
    that did not end.
    """
    episodes = EpisodeRows.of(batch)
    batch["environment_rewards"] = batch["rewards"].clone()
    batch["rewards"] = _scaled(section, batch["rewards"])
    if section.reward_shaping.enabled and section.reward_shaping.max_response_length is not None:
        batch["rewards"] = penalize_overlong(
            batch["rewards"],
            episodes.on_rows(episodes.total(batch["token_mask"].sum(1))),
            overlong_buffer_length=section.reward_shaping.overlong_buffer_length,
            overlong_buffer_penalty=section.reward_shaping.overlong_buffer_penalty,
            max_response_length=section.reward_shaping.max_response_length,
        )
    if section.overlong_filtering:
        batch["sample_mask"] = batch["sample_mask"] * batch["finished"]


def has_signal(section: RolloutConfig, group: BatchedDataDict) -> bool:
    """Return whether the rewards of a group differ, so that dynamic sampling trains on it.

    They are judged before the penalty of long responses, as NeMo RL does: answers that are all right or all wrong teach
    nothing but their length. Dropped episodes stay in the group, but their rewards do not count.
    """
    rewards = _scaled(section, group["rewards"])[EpisodeRows.of(group).first]
    return bool((rewards != rewards[:1]).any())


def _scaled(section: RolloutConfig, rewards: Tensor) -> Tensor:
    scaling = section.reward_scaling
    if not scaling.enabled:
        return rewards
    return scale_rewards(
        rewards,
        source_min=scaling.source_min,
        source_max=scaling.source_max,
        target_min=scaling.target_min,
        target_max=scaling.target_max,
    )


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
        raise RefusedError(
            f"overlong_buffer_length must be at least 1, got {overlong_buffer_length}", code="overlong-buffer"
        )
    excess = (response_lengths - (max_response_length - overlong_buffer_length)).clamp(min=0)
    return rewards - excess / overlong_buffer_length * overlong_buffer_penalty


@dataclass(frozen=True)
class GroupStatistics:
    """Per row, in fp64: the mean and the unbiased standard deviation of the rewards it is compared with."""

    baseline: Tensor
    std: Tensor


def group_numbers(prompt_ids: Tensor) -> Tensor:
    """Return [B] the number of each row's group, counted from 0."""
    rows = None if prompt_ids.ndim == 1 else 0  # numbers are sorted, rows compared one by one
    _, numbers = cast("tuple[Tensor, Tensor]", torch.unique(prompt_ids, dim=rows, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    return numbers


def group_statistics(prompt_ids: Tensor, rewards: Tensor, *, leave_one_out: bool) -> GroupStatistics:
    """Return the statistics of each row's group, without the row itself when `leave_one_out`.

    A group of one has its reward as baseline; a deviation that is not defined is 0. Computed in fp64 from what the
    row is compared with alone: sums of the group less the row's share would cancel, and leave a deviation of rounding
    errors to divide by where the others are equal.
    """
    rewards = rewards.to(torch.float64)
    baseline, std = rewards.clone(), torch.zeros_like(rewards)
    for rows_GN in _groups_by_size(group_numbers(prompt_ids)):
        compared_GN = rewards[rows_GN]
        compared = _without_each(compared_GN) if leave_one_out else compared_GN.unsqueeze(1)
        if compared.shape[-1]:
            mean, deviation = _mean_and_std(compared)
            baseline[rows_GN], std[rows_GN] = mean.expand_as(rows_GN), deviation.expand_as(rows_GN)
    return GroupStatistics(baseline, std)


def rows_with_signal(prompt_ids: Tensor, rewards: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return [B] bool: whether the row's group has two different rewards, as dynamic sampling asks.

    counted: bool [B], the rows whose rewards are looked at; None is all.
    """
    groups = group_numbers(prompt_ids)
    start = torch.zeros_like(rewards)
    of_counted, given = (groups, rewards) if counted is None else (groups[counted], rewards[counted])
    largest = start.scatter_reduce(0, of_counted, given, "amax", include_self=False)
    smallest = start.scatter_reduce(0, of_counted, given, "amin", include_self=False)
    return (largest != smallest)[groups]


def _groups_by_size(groups: Tensor) -> Iterator[Tensor]:
    """Yield the row numbers [G,N] of all groups of N rows, for each N that there is."""
    order = groups.argsort(stable=True)
    sizes = groups.bincount()[groups[order]]
    for size in sorted(set(cast("list[int]", sizes.tolist()))):  # pyright: ignore[reportUnknownMemberType]
        yield order[sizes == size].view(-1, size)


def _without_each(values_GN: Tensor) -> Tensor:
    """Return [G,N,N-1]: for each member of a group the others."""
    members = torch.arange(values_GN.shape[1], device=values_GN.device)
    others = members[:-1] + (members[:-1] >= members.unsqueeze(1))  # [N,N-1]: those before, and those after
    return values_GN[:, others]


def _mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation over the last dimension, the latter 0 for one value and exactly so for equal ones."""
    first = values[..., :1]
    shifted = values - first  # exactly 0 where all are equal, whatever the rounding of their sum
    mean = shifted.mean(-1, keepdim=True)
    squares = (shifted - mean).square().sum(-1)
    return (first + mean).squeeze(-1), (squares / max(values.shape[-1] - 1, 1)).sqrt()
