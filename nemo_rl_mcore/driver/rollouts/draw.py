"""The prompts of a run: drawn by the step, in the order of the data set's passes, each with the noise of that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector, concatenate_batches
from nemo_rl_mcore.driver.rollouts.rewards import has_signal, shape_rewards

EQUAL_REWARDS = "equal rewards"
"""Why dynamic sampling does not train on a group."""


@dataclass(frozen=True)
class DrawnGroup:
    """A prompt of a step, and what an engine is asked for its group."""

    prompt: Prompt
    asked: BatchedDataDict
    step: int
    """That drew the prompt; with the row it keys the noise, whenever the group is answered and trained."""


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
        self._steps: dict[int, Sequence[DrawnGroup]] = {}

    def keep(self, steps: range) -> bool:
        """Draw these steps, and forget all others; says whether any was new."""
        new = [step for step in steps if step not in self._steps]
        for step in new:
            self._steps[step] = self._draw.groups_of(step)
        for step in [one for one in self._steps if one not in steps]:
            del self._steps[step]
        return bool(new)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, position: int) -> bool:
        return position // self._draw.groups_per_step + 1 in self._steps

    def __getitem__(self, position: int) -> DrawnGroup:
        """Return a group; one that is behind, which is trained again, is drawn again with its step."""
        step, place = divmod(position, self._draw.groups_per_step)
        if step + 1 not in self._steps:
            self._steps[step + 1] = self._draw.groups_of(step + 1)
        return self._steps[step + 1][place]
