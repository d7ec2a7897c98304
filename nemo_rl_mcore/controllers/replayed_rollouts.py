"""Groups as the log of a run has them: drawn again by the weights of then, or read from where they were kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Self

from nemo_rl_mcore.controllers.draw import Draw, DrawnGroup
from nemo_rl_mcore.controllers.group_store import GroupStore, digest_of_group
from nemo_rl_mcore.controllers.logged_turns import LoggedReplies
from nemo_rl_mcore.controllers.metrics import Pace
from nemo_rl_mcore.controllers.timeline import Timeline
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.interfaces import RolloutEngines
from nemo_rl_mcore.loop_thread import LoopThread


def ticket_of(position: int, turn: int) -> str:
    """What a replay calls a turn of the group, counted from 0, to the engine that draws it again."""
    return f"group {position}, turn {turn + 1}"


class ReplayedRollouts:
    """Implements `rollouts.StepGroups` for the steps of a log, one after the other.

    engines: what draws groups again, each token with the weights that its schedule names; None reads all of them.
    kept: the groups of the run that were written down. Every group is held against the digest in the log.
    """

    def __init__(
        self,
        timeline: Timeline,
        steps: range,
        draw: Draw,
        groups_per_step: int,
        engines: RolloutEngines | None,
        kept: GroupStore,
    ) -> None:
        self.groups = GroupStore()
        self.unequal: list[int] = []
        """Groups whose tokens or log-probabilities are not those of the log."""
        self.drawn_again = 0
        """Groups that were not read."""
        self._timeline, self._draw, self._groups_per_step = timeline, draw, groups_per_step
        self._engines, self._kept = engines, kept
        self._step = steps.start - 1
        self._positions = {*timeline.positions(steps)}
        self._drawn: dict[int, Sequence[DrawnGroup]] = {}
        self._ahead: dict[int, list[int]] = {}
        """Of groups under way: the versions that begin the turns which are not asked for yet."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = LoopThread("replay", self._stop)

    def update_weights(self, version: int) -> None:
        """Give the engine the weights, once no turn is to begin with older ones; ask for the groups that begin so."""
        if self._engines is None:
            return
        self._wait(lambda: not any(first < version for ahead in self._ahead.values() for first in ahead))
        self._engines.update_weights(version)
        for position in sorted(self._positions):
            logged = self._timeline.groups[position]
            if logged.oldest == version and position not in self._kept:
                self._ahead[position] = [turn.segments[0].version for turn in logged.turns]
                self._thread.begin(self._answer(position, self._group(position)))
        self._thread.call(_nothing()).result()  # before the next update, the engine has been asked

    def begin(self) -> int:
        """Open the next step."""
        return self._step + 1

    def chunks(self, at_least: int) -> Iterator[Sequence[int]]:
        """The chunks of the log, each when all its groups are there."""
        for chunk in self._timeline.chunks[self._step + 1]:
            for position in chunk:
                if position in self._kept and position not in self.groups:
                    self._take(position, self._kept.get(position))
            self._wait(lambda: all(p in self.groups for p in chunk))  # noqa: B023
            yield chunk

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or ready())
        if self._error is not None:
            raise self._error

    def chunks_of(self, step: int) -> Sequence[Sequence[int]]:
        """Those of the log."""
        return self._timeline.chunks[step]

    def prompt_of(self, position: int) -> Prompt:
        """The prompt of a group."""
        return self._group(position).prompt

    def finishing(self) -> None:
        """Nothing to note: the log is written."""

    def finish(self) -> Pace:
        """Go on to the next step; nobody is timed."""
        self._step += 1
        waiting = {position for position in self.groups.positions if position not in self._of(self._step)}
        self.groups.forget_all_but(waiting)
        return Pace()

    def give_up(self, reason: str) -> None:
        """Nothing to note: the replay ends."""

    def checkpointed(self, step: int) -> None:
        """Nothing to note: a replay saves nothing."""

    def __enter__(self) -> Self:
        """Return the rollouts."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._thread.close()

    def _of(self, step: int) -> set[int]:
        return {position for chunk in self._timeline.chunks[step] for position in chunk}

    def _group(self, position: int) -> DrawnGroup:
        step, place = position // self._groups_per_step + 1, position % self._groups_per_step
        if step not in self._drawn:
            self._drawn[step] = self._draw.groups_of(step)
        return self._drawn[step][place]

    async def _answer(self, position: int, group: DrawnGroup) -> None:
        turns = count()

        async def respond(asked: BatchedDataDict) -> BatchedDataDict:
            assert self._engines is not None
            answering = self._engines.respond(asked, step=group.step, ticket=ticket_of(position, next(turns)))
            answered = asyncio.ensure_future(answering)
            await asyncio.sleep(0)  # it is asked for
            with self._changed:
                del self._ahead[position][:1]
                self._changed.notify_all()
            return await answered

        replies = LoggedReplies(self._timeline.groups[position].turns)
        batch = await self._draw.play(group, respond, replies)
        self.drawn_again += 1
        self._take(position, batch)

    def _take(self, position: int, batch: BatchedDataDict) -> None:
        with self._changed:
            if digest_of_group(batch) != self._timeline.groups[position].digest:
                self.unequal.append(position)
            self.groups.put(position, batch)
            self._changed.notify_all()

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


async def _nothing() -> None:
    """What is begun after others have reached their first wait."""


def require_replies(timeline: Timeline, positions: Sequence[int], kept: GroupStore) -> None:
    """Raise RunStoppedError for groups of which neither the log nor the run's folder says what the environment said."""
    silent = [
        position
        for position in positions
        if ("rewards" not in kept.get(position) if position in kept else not timeline.groups[position].turns)
    ]
    if silent:
        raise RunStoppedError(
            f"groups {silent} cannot be replayed: the run is of an earlier version, whose log does not tell rewards"
        )


def missing_groups(timeline: Timeline, steps: range, kept: GroupStore) -> list[int]:
    """The groups of these steps that can neither be read nor drawn again, for weights of before drew some of them."""
    return [
        position
        for position in timeline.positions(steps)
        if position not in kept and timeline.groups[position].oldest < steps.start - 1
    ]


def require_steps(timeline: Timeline, steps: range, kept: GroupStore, log: str) -> None:
    """Raise RunStoppedError unless the log has them all, each with groups that were there to be trained."""
    lacking = [step for step in steps if step not in timeline.chunks]
    if lacking or not steps:
        there = f"{min(timeline.chunks)} to {max(timeline.chunks)}" if timeline.chunks else "none"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps.stop - 1}: {log} has steps {there}; name a range of them, the step "
            "before the first one and the last one",
            code="missing-steps",
        )
    for step in steps:
        for position in timeline.positions(range(step, step + 1)):
            group = timeline.groups.get(position)
            versions = [] if group is None else group.versions
            # An embedded engine's versions go up: drawing the group again would wait for one that has been.
            in_vain = position not in kept and versions != sorted(versions)
            if not versions or max(versions) >= step or in_vain:
                drawn = f"drawn by {versions}" if versions else "never drawn"
                raise RunStoppedError(
                    f"{log}: step {step} trains group {position}, which was {drawn} before it"
                )
