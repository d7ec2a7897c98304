"""Rewards before they become advantages: scaling, length penalties, and the statistics of groups.

A group is the rows with equal prompt ids; prompt ids are [B] numbers or [B,P] token rows. G groups have N rows each.
A row here is an answer: of an episode of several rows one is given, of one that was dropped none.
"""

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
