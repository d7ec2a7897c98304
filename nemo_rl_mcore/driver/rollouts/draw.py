"""The prompts of a run, drawn by the step with the noise of that step, and the rewards of the answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.rollouts.episode_rows import EpisodeRows
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector, concatenate_batches
from nemo_rl_mcore.errors import RefusedError


def shape_rewards(section: RolloutConfig, batch: BatchedDataDict) -> None:
    """Scale and penalize `rewards` [B] of scored rows as the section says, row by row.

    What the environment gave is kept as environment_rewards [B]; overlong_filtering clears the sample_mask of responses
    that did not end.
    """
    episodes, shaping = EpisodeRows.of(batch), section.reward_shaping
    batch["environment_rewards"] = batch["rewards"].clone()
    batch["rewards"] = _scaled(section, batch["rewards"])
    if shaping.enabled and shaping.max_response_length is not None:
        batch["rewards"] = penalize_overlong(
            batch["rewards"],
            episodes.on_rows(episodes.total(batch["token_mask"].sum(1))),
            overlong_buffer_length=shaping.overlong_buffer_length,
            overlong_buffer_penalty=shaping.overlong_buffer_penalty,
            max_response_length=shaping.max_response_length,
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


EQUAL_REWARDS = "equal rewards"
"""Why dynamic sampling does not train on a group."""


@dataclass(frozen=True)
class DrawnGroup:
    """A prompt of a step, and what an engine is asked for its group.

    step: that drew the prompt; with the row it keys the noise, whenever the group is answered and trained.
    """

    prompt: Prompt
    asked: BatchedDataDict
    step: int


@dataclass(frozen=True)
class Draw:
    """Draws the prompts of steps, and makes what a step trains on of the answers to them.

    collector: plays episodes. groups_per_step: prompts of a step. samples: responses to each. section: how rewards are
    shaped, and whether groups of equal rewards are replaced (dynamic sampling, https://arxiv.org/abs/2503.14476); None
    does neither.
    """

    prompts: PromptSource
    collector: RolloutCollector
    groups_per_step: int
    samples: int
    section: RolloutConfig | None = None

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        """Return the groups of a step, in order; called by the thread that trains."""
        drawn = self.prompts.train_batch(step, self.groups_per_step)
        return [DrawnGroup(prompt, self.collector.ask([prompt], self.samples), step) for prompt in drawn]

    def play_now(self, groups: Sequence[DrawnGroup]) -> list[BatchedDataDict]:
        """Return the episodes of groups of one step, answered in one call; called by the thread that trains."""
        pad = self.collector.tokenizer.pad_token_id
        asked = concatenate_batches([group.asked for group in groups], pad)
        batch = self.collector.play_now([group.prompt for group in groups], asked, step=groups[0].step)
        episodes = batch.samples()
        firsts = [episodes[place].start for place in range(0, len(episodes), self.samples)]
        return [batch.slice(first, end) for first, end in zip(firsts, [*firsts[1:], batch.size], strict=True)]

    def unused_for(self, group: BatchedDataDict) -> str | None:
        """Return why an answered group is not to be trained on; None for one that is."""
        if self.section is None or not self.section.use_dynamic_sampling or has_signal(self.section, group):
            return None
        return EQUAL_REWARDS

    def rollout_of(self, groups: Sequence[DrawnGroup], batches: Sequence[BatchedDataDict]) -> Rollout:
        """Return the rows of answered groups, with shaped rewards, as what a step trains on."""
        batch = concatenate_batches(batches, self.collector.tokenizer.pad_token_id)
        if self.section is not None:
            shape_rewards(self.section, batch)
        return self.collector.as_rollout([group.prompt for group in groups], batch)


class DrawnGroups:
    """Holds the groups of the steps that are asked for or trained now, by position."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.steps: dict[int, Sequence[DrawnGroup]] = {}

    def keep(self, steps: range) -> bool:
        """Draw these steps, and forget all others; says whether any was new."""
        new = [step for step in steps if step not in self.steps]
        for step in new:
            self.steps[step] = self._draw.groups_of(step)
        self.steps = {step: groups for step, groups in self.steps.items() if step in steps}
        return bool(new)

    def __contains__(self, position: int) -> bool:
        return position // self._draw.groups_per_step + 1 in self.steps

    def __getitem__(self, position: int) -> DrawnGroup:
        """Return a group; one that is behind, which is trained again, is drawn again with its step."""
        step, place = divmod(position, self._draw.groups_per_step)
        if step + 1 not in self.steps:
            self.steps[step + 1] = self._draw.groups_of(step + 1)
        return self.steps[step + 1][place]
