"""The prompts of a run: drawn by the step, in the order of the data set's passes, each with the noise of that step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector, concatenate_batches
from nemo_rl_mcore.driver.rollouts.rewards import has_signal, shape_rewards

EQUAL_REWARDS = "equal rewards"
"""Why dynamic sampling does not train on a group."""

type Respond = Callable[[BatchedDataDict], Awaitable[BatchedDataDict]]
"""Asks an engine for the answers of a turn, see `interfaces.RolloutEngines.respond`."""


@dataclass(frozen=True)
class DrawnGroup:
    """A prompt of a step, and what an engine is asked for its group."""

    prompt: Prompt
    asked: BatchedDataDict
    step: int
    """That drew the prompt; with the row it keys the noise, whenever the group is answered and trained."""


class Draw(Protocol):
    """Draws prompts, and plays their episodes."""

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        """Return the groups of a step, in order; called by the thread that trains."""
        ...

    async def play(self, group: DrawnGroup, respond: Respond) -> BatchedDataDict:
        """Return the group's episodes, see `Rollout`; called from the asyncio loop of who asks."""
        ...

    def play_now(self, groups: Sequence[DrawnGroup]) -> list[BatchedDataDict]:
        """Return the episodes of groups of one step, answered in one call; called by the thread that trains."""
        ...

    def is_answer_to(self, group: DrawnGroup, batch: BatchedDataDict) -> bool:
        """Say whether kept episodes are of this group: of its prompt, and as many."""
        ...

    def unused_for(self, group: BatchedDataDict) -> str | None:
        """Return why an answered group is not to be trained on; None for one that is."""
        ...

    def rollout_of(self, groups: Sequence[DrawnGroup], batches: Sequence[BatchedDataDict]) -> Rollout:
        """Return the rows of answered groups, with shaped rewards, as what a step trains on."""
        ...

    def check_drops(self, step: int, batches: Sequence[BatchedDataDict]) -> None:
        """Raise RunStoppedError where too many episodes of a whole step were dropped. batches: its groups."""
        ...

    def take_counts(self) -> Mapping[str, float]:
        """Return what the environments went through since the last call; see `interfaces.Environments.take_counts`."""
        ...


@dataclass(frozen=True)
class GroupDraw:
    """Implements `Draw` over a source of prompts.

    groups_per_step: prompts of a step. samples: responses to each. section: how rewards are shaped, and whether groups
    of equal rewards are replaced (dynamic sampling, https://arxiv.org/abs/2503.14476); None does neither.
    """

    prompts: PromptSource
    collector: RolloutCollector
    groups_per_step: int
    samples: int
    section: RolloutConfig | None = None

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        """See `Draw.groups_of`."""
        drawn = self.prompts.train_batch(step, self.groups_per_step)
        return [DrawnGroup(prompt, self.collector.ask([prompt], self.samples), step) for prompt in drawn]

    async def play(self, group: DrawnGroup, respond: Respond) -> BatchedDataDict:
        """See `Draw.play`."""
        return await self.collector.play([group.prompt], group.asked, respond)

    def play_now(self, groups: Sequence[DrawnGroup]) -> list[BatchedDataDict]:
        """See `Draw.play_now`."""
        pad = self.collector.tokenizer.pad_token_id
        asked = concatenate_batches([group.asked for group in groups], pad)
        batch = self.collector.play_now([group.prompt for group in groups], asked, step=groups[0].step)
        episodes = batch.samples()
        firsts = [episodes[place].start for place in range(0, len(episodes), self.samples)]
        return [batch.slice(first, end) for first, end in zip(firsts, [*firsts[1:], batch.size], strict=True)]

    def is_answer_to(self, group: DrawnGroup, batch: BatchedDataDict) -> bool:
        """See `Draw.is_answer_to`."""
        return self.collector.is_answer_to(group.asked, batch)

    def unused_for(self, group: BatchedDataDict) -> str | None:
        """See `Draw.unused_for`."""
        if self.section is None or not self.section.use_dynamic_sampling or has_signal(self.section, group):
            return None
        return EQUAL_REWARDS

    def rollout_of(self, groups: Sequence[DrawnGroup], batches: Sequence[BatchedDataDict]) -> Rollout:
        """See `Draw.rollout_of`."""
        batch = concatenate_batches(batches, self.collector.tokenizer.pad_token_id)
        if self.section is not None:
            shape_rewards(self.section, batch)
        return self.collector.as_rollout([group.prompt for group in groups], batch)

    def check_drops(self, step: int, batches: Sequence[BatchedDataDict]) -> None:
        """See `Draw.check_drops`."""
        self.collector.check_drops(step, batches)

    def take_counts(self) -> Mapping[str, float]:
        """See `Draw.take_counts`."""
        return self.collector.environments.take_counts()


class DrawnGroups:
    """Holds the groups of the steps that are asked for or trained now, by position."""

    def __init__(self, draw: Draw, groups_per_step: int) -> None:
        self._draw, self._groups_per_step = draw, groups_per_step
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
        """Return how many steps are drawn."""
        return len(self._steps)

    def __contains__(self, position: int) -> bool:
        """Say whether the step of a group is drawn."""
        return position // self._groups_per_step + 1 in self._steps

    def __getitem__(self, position: int) -> DrawnGroup:
        """Return a group; one that is behind, which is trained again, is drawn again with its step."""
        step, place = divmod(position, self._groups_per_step)
        if step + 1 not in self._steps:
            self._steps[step + 1] = self._draw.groups_of(step + 1)
        return self._steps[step + 1][place]
