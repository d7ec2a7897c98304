"""The prompts of an asynchronous run: drawn in the order of a synchronous one, with its noise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.interfaces import Replies

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
    """What knows the prompts; called by the thread that trains."""

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        """The groups of a step, in order."""
        ...

    async def play(
        self, group: DrawnGroup, respond: Respond, replies: Replies | None = None
    ) -> BatchedDataDict:
        """The group's episodes, see `algorithms.rollout.Rollout`; called from the asyncio loop of who asks.

        replies: in place of the run's environments.
        """
        ...


@dataclass(frozen=True)
class GroupDraw:
    """Implements `Draw` over a source of prompts."""

    prompts: PromptSource
    collector: RolloutCollector
    groups_per_step: int
    samples: int

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        """See `Draw.groups_of`."""
        drawn = self.prompts.train_batch(step, self.groups_per_step)
        return [DrawnGroup(prompt, self.collector.ask([prompt], self.samples), step) for prompt in drawn]

    async def play(
        self, group: DrawnGroup, respond: Respond, replies: Replies | None = None
    ) -> BatchedDataDict:
        """See `Draw.play`."""
        return await self.collector.play([group.prompt], group.asked, respond, replies)


class DrawnGroups:
    """The groups of the steps that are asked for or trained now, by position."""

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
        """Steps that are drawn."""
        return len(self._steps)

    def __contains__(self, position: int) -> bool:
        """Whether the step of a group is drawn."""
        return position // self._groups_per_step + 1 in self._steps

    def __getitem__(self, position: int) -> DrawnGroup:
        """A group; one that is behind, which is trained again, is drawn again with its step."""
        step, place = divmod(position, self._groups_per_step)
        if step + 1 not in self._steps:
            self._steps[step + 1] = self._draw.groups_of(step + 1)
        return self._steps[step + 1][place]
