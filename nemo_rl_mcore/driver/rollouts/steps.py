"""Define what a train step is given: its groups as they are answered, and whom it reports to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.draw import Draw, DrawnGroup
from nemo_rl_mcore.driver.rollouts.player import Rollout


class StepGroups(Protocol):
    """The groups of one train step; `scheduler.OpenStep` in a run, `KnownStep` where a step is trained again."""

    def chunks(self, at_least: int) -> Iterator[Rollout]:
        """Yield groups in their order as soon as so many more are answered, until the step is full.

        Raises RunStoppedError where too many episodes of the whole step were dropped.
        """
        ...

    def whole(self) -> Rollout:
        """Return all groups of the step at once."""
        ...

    def finishing(self) -> None:
        """Take note that the optimizer is about to step."""
        ...

    def finish(self) -> dict[str, float]:
        """Take note that it has; returns what the step reports of how its groups came to be."""
        ...

    def unused(self) -> Sequence[Rollout]:
        """Return groups that were answered since the last step and that none trains on."""
        ...


class StepSource(Protocol):
    """Opens train steps: a scheduler of a run, or a replay."""

    def open_step(self, step: int) -> AbstractContextManager[StepGroups]:
        """Open the next step; where the block fails it leaves no trace, and its groups can be trained again."""
        ...

    def known_step(self, step: int) -> StepGroups:
        """Return the groups of a finished step, to train it again."""
        ...

    def checkpointed(self, step: int) -> None:
        """Take note that the checkpoint of a step is whole: what was trained up to it is not needed any more."""
        ...


@dataclass
class KnownStep:
    """Implements `StepGroups` for a step whose groups are there; nothing of it is recorded.

    groups, batches: of each chunk.
    """

    number: int
    draw: Draw
    groups: Sequence[Sequence[DrawnGroup]]
    batches: Sequence[Sequence[BatchedDataDict]]

    def chunks(self, at_least: int) -> Iterator[Rollout]:
        """Yield the chunks as they were."""
        for groups, batches in zip(self.groups, self.batches, strict=True):
            yield self.draw.rollout_of(groups, batches)

    def whole(self) -> Rollout:
        """See `StepGroups.whole`."""
        return self.draw.rollout_of(
            [group for chunk in self.groups for group in chunk],
            [batch for chunk in self.batches for batch in chunk],
        )

    def finishing(self) -> None:
        """Do nothing."""

    def finish(self) -> dict[str, float]:
        """Do nothing."""
        return {}

    def unused(self) -> Sequence[Rollout]:
        """Return nothing: they were recorded when the step was trained first."""
        return ()
