"""The steps of a log, with the groups that the run has kept: what a replay trains on."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.draw import Draw, DrawnGroups
from nemo_rl_mcore.driver.rollouts.group_store import digest_of_group, versions_of
from nemo_rl_mcore.driver.rollouts.saved_groups import load_groups
from nemo_rl_mcore.driver.rollouts.steps import KnownStep
from nemo_rl_mcore.driver.rollouts.timeline import Timeline
from nemo_rl_mcore.errors import RunStoppedError, code_of


class ReplayedSteps:
    """Implements `steps.StepSource` for steps of a log.

    Groups are read when they are first asked for, and those of a step held until the step is trained. folder: of the
    kept groups, one of each step in it.
    """

    def __init__(
        self, timeline: Timeline, steps: range, folder: Path, draw: Draw, groups_per_step: int
    ) -> None:
        self._timeline, self._steps, self._folder, self._draw = timeline, steps, folder, draw
        self._drawn = DrawnGroups(draw, groups_per_step)
        self._held: dict[int, dict[int, BatchedDataDict]] = {}

    def groups(self, step: int) -> dict[int, BatchedDataDict]:
        """Return the groups of a step by position; raises RunStoppedError for damage, and other ones than the log's."""
        if step not in self._held:
            found = self._read(step)
            logged = {position: self._timeline.groups[position] for position in self._positions(step)}
            unequal = [
                position
                for position, group in logged.items()
                if position not in found
                or digest_of_group(found[position]) != group.digest
                or versions_of(found[position], group.oldest) != [*group.segments]
            ]
            if unequal:
                raise RunStoppedError(
                    f"step {step}: groups {unequal} are not those of the log", code="unequal-groups"
                )
            self._held[step] = {position: found[position] for position in logged}
        return self._held[step]

    def drawn_by(self, version: int) -> dict[int, dict[int, BatchedDataDict]]:
        """Return the steps after a version, each with its groups, that this version may have drawn tokens of."""
        return {
            step: self.groups(step)
            for step in self._steps
            if step > version
            and any(self._timeline.groups[one].oldest <= version for one in self._positions(step))
        }

    @contextmanager
    def open_step(self, step: int) -> Generator[KnownStep]:
        """See `StepSource.open_step`; its groups are forgotten after the block."""
        yield self.known_step(step)
        del self._held[step]

    def known_step(self, step: int) -> KnownStep:
        """See `StepSource.known_step`."""
        groups, chunks = self.groups(step), self._timeline.chunks[step]
        return KnownStep(
            step,
            self._draw,
            [[self._drawn[position] for position in chunk] for chunk in chunks],
            [[groups[position] for position in chunk] for chunk in chunks],
        )

    def checkpointed(self, step: int) -> None:
        """Do nothing: a replay saves nothing."""

    def _positions(self, step: int) -> Sequence[int]:
        return self._timeline.positions(range(step, step + 1))

    def _read(self, step: int) -> dict[int, BatchedDataDict]:
        folder = self._folder / f"step_{step}"
        try:
            found = load_groups(folder)
        except ValueError as error:
            raise RunStoppedError(f"{folder}: {error}", code=code_of(error)) from error
        if any("rewards" not in group for group in found.values()):
            raise RunStoppedError(
                f"{folder} cannot be replayed: the run is of an earlier version, which kept no rewards",
                code="no-rewards",
            )
        return found


def require_steps(timeline: Timeline, steps: range, log: str) -> None:
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
            if not versions or max(versions) >= step:
                drawn = f"drawn by {versions}" if versions else "never drawn"
                raise RunStoppedError(
                    f"{log}: step {step} trains group {position}, which was {drawn} before it",
                    code="untimely-group",
                )


def require_kept(folder: Path, steps: range, key: str) -> None:
    """Raise RunStoppedError unless the groups of all these steps are kept in a folder; key: what has them kept."""
    gone = [step for step in steps if not (folder / f"step_{step}").is_dir()]
    if gone:
        first = next((step for step in steps if step > gone[-1]), None)
        remedy = (
            f"begin after step {gone[-1]}, at a checkpoint"
            if first
            else f"{key}.keep_groups: true keeps them"
        )
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps.stop - 1}: {folder} does not have the groups of "
            f"{len(gone)} of these steps, {gone[0]} to {gone[-1]}: the run did not keep them, or no more than "
            f"{key}.keep_groups_gb; {remedy}",
            code="groups-gone",
        )


def first_of_replay(starts: Iterable[int], steps: range, folder: Path) -> int:
    """Return the first step to train so as to come to these: behind the last start whose kept groups lead there.

    starts: the steps whose weights are there, 0 for those that the run began with. Raises RunStoppedError without one.
    """

    def reached(start: int) -> int:
        return next(step for step in count(start) if not (folder / f"step_{step + 1}").is_dir())

    ends = {start: reached(start) for start in sorted(starts)}
    fitting = [start for start, end in ends.items() if start < steps.start and end >= steps[-1]]
    if not fitting:
        there = ", ".join(f"{start}:{end}" for start, end in ends.items() if end > start) or "none"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps[-1]}: no weights of step {steps.start - 1} are kept, nor any before it "
            f"from which {folder} leads there; what can be replayed: {there}",
            code="no-start",
        )
    return fitting[-1] + 1
