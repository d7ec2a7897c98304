"""Decide which prompt groups are answered now, which ones the next step trains on, and how long each is kept.

One scheduler serves every algorithm that samples. Groups wait here, from the draw of their prompt to the optimizer.
Subclasses ask for them: `SynchronousScheduler` in the thread that trains, all groups of a step in one call before it
trains; `AsynchronousScheduler` in a second thread, group by group, while earlier steps train.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.rollouts.draw import Draw, DrawnGroup, DrawnGroups
from nemo_rl_mcore.driver.rollouts.event_log import LogMark
from nemo_rl_mcore.driver.rollouts.events import Token
from nemo_rl_mcore.driver.rollouts.group_store import GroupStore, Retention, digest_of_group, versions_of
from nemo_rl_mcore.driver.rollouts.ledger import Ledger
from nemo_rl_mcore.driver.rollouts.metrics import Pace, sampling_metrics
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.saved_ledger import SavedLedger
from nemo_rl_mcore.driver.rollouts.saved_rollouts import SavedRollouts
from nemo_rl_mcore.driver.rollouts.states import StepState
from nemo_rl_mcore.driver.rollouts.steps import KnownStep
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import activity


@dataclass
class OpenStep:
    """Implements `steps.StepGroups` for the step that a scheduler has open."""

    number: int
    scheduler: Scheduler[Any]
    _taken: list[Rollout] = field(default_factory=list[Rollout], init=False)

    def chunks(self, at_least: int) -> Iterator[Rollout]:
        """See `StepGroups.chunks`."""
        draw, answered = self.scheduler.draw, list[BatchedDataDict]()
        for positions in self.scheduler.leases(at_least):
            groups, batches = self.scheduler.groups_at(positions)
            answered += batches  # as they are: a chunk that is trained on has more columns than the next one
            self._taken.append(draw.rollout_of(groups, batches))
            if not self.scheduler.ledger.room():
                draw.check_drops(self.number, answered)
            yield self._taken[-1]

    def whole(self) -> Rollout:
        """See `StepGroups.whole`."""
        [rollout] = self.chunks(self.scheduler.ledger.limits.groups_per_step)
        return rollout

    def finishing(self) -> None:
        """See `StepGroups.finishing`."""
        self.scheduler.finishing()

    def finish(self) -> dict[str, float]:
        """See `StepGroups.finish`."""
        reported = self.scheduler.report(self.scheduler.finish(), self._taken)
        return {**reported, **self.scheduler.draw.take_counts()}

    def unused(self) -> Sequence[Rollout]:
        """See `StepGroups.unused`."""
        return self.scheduler.take_unused()


@dataclass(eq=False)
class Scheduler[Engine: GenerationInterface](ABC):
    """Keeps the ledger of groups and their data; implements `steps.StepSource` for algorithms.

    For the training loop it is the engine (`interfaces.GenerationInterface`): it publishes the updates of the weights.
    A context manager: what is under way is given up at its end.

    Args:
        ledger: the state of every group and of the train step.
        groups: their data.
        engine: what answers.
        draw: what draws prompts and plays episodes.
        retention: how long groups are kept that have been trained.
        most_unused: groups with equal rewards after which a step of dynamic sampling gives up.

    """

    ledger: Ledger
    groups: GroupStore
    engine: Engine
    draw: Draw
    retention: Retention
    most_unused: int | None = None

    def __post_init__(self) -> None:
        self._drawn = DrawnGroups(self.draw, self.ledger.limits.groups_per_step)
        self._changed = threading.Condition()
        self._pace = Pace()
        self._unused: list[tuple[int, BatchedDataDict]] = []

    # What the training loop asks of its engine

    def update_weights(self, version: int) -> None:
        """Give the engine the policy's weights, and publish the version; see `interfaces.GenerationInterface`."""
        self.engine.update_weights(version)
        with self._changed:
            self._publish(version)

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts that are in no group, as of a validation; the weights do not change meanwhile."""
        return self.engine.generate(data, step=step, greedy=greedy)

    @abstractmethod
    def offload(self) -> None:
        """See `interfaces.GenerationInterface.offload`."""

    # What the train step asks

    @contextmanager
    def open_step(self, step: int) -> Generator[OpenStep]:
        """See `steps.StepSource.open_step`."""
        with self._changed:
            assert self.ledger.begin() == step
        try:
            yield OpenStep(step, self)
        except BaseException as error:
            self._give_up(type(error).__name__)
            raise

    def known_step(self, step: int) -> KnownStep:
        """See `steps.StepSource.known_step`; raises LedgerError once the step is forgotten."""
        with self._changed:
            chunks = [self.groups_at(positions) for positions in self.ledger.chunks_of(step)]
        return KnownStep(
            step, self.draw, [groups for groups, _ in chunks], [batches for _, batches in chunks]
        )

    def checkpointed(self, step: int) -> None:
        """See `steps.StepSource.checkpointed`."""
        with self._changed:
            self.ledger.checkpointed(step)
            if self.retention.archive is not None:
                self.retention.archive.checkpointed(step)
            if self.retention.until_checkpoint:  # else later steps may be forgotten by then
                self._forget(step)

    # What an open step asks

    def leases(self, at_least: int) -> Iterator[Sequence[int]]:
        """Yield positions of the open step's groups, as soon as so many more are answered, until it is full."""
        while room := self.ledger.room():
            wanted = min(at_least, room)
            with activity.at(f"taking {wanted} groups at least"):
                self._wait_for_ready(wanted)
                with self._changed:
                    positions = self.ledger.leasable()
                    self.ledger.lease(positions)
            if not self.ledger.room():
                self._filled()
            yield positions

    def groups_at(self, positions: Sequence[int]) -> tuple[list[DrawnGroup], list[BatchedDataDict]]:
        """Return groups as they were drawn, and their data."""
        with self._changed:
            return [self._drawn[one] for one in positions], [self.groups.get(one) for one in positions]

    def finishing(self) -> None:
        """Take note that the optimizer is about to step."""
        with self._changed:
            self.ledger.finishing()

    def finish(self) -> Pace:
        """Take note that it has; returns what happened since the last step."""
        with self._changed:
            self.ledger.finish()
            pace, self._pace = self._pace, Pace()
            return pace

    def report(self, pace: Pace, trained: Sequence[Rollout]) -> dict[str, float]:
        """Return what a step reports of how its groups came to be. trained: its chunks."""
        if self.most_unused is None:
            return {}
        return sampling_metrics(pace, self.ledger.limits.groups_per_step)

    def take_unused(self) -> list[Rollout]:
        """Return groups that were answered since the last call and that no step trains on."""
        with self._changed:
            unused, self._unused = self._unused, []
            return [self.draw.rollout_of([self._drawn[position]], [group]) for position, group in unused]

    def saved(self, mark_log: Callable[[], LogMark]) -> SavedRollouts:
        """Return what a checkpoint between two steps is to hold, as it is now; groups may be answered meanwhile."""
        with self._changed:
            ledger = SavedLedger.model_validate(self.ledger.to_json())
            ready = {position: self.groups.get(position) for position in ledger.ready}
            return SavedRollouts(ledger, mark_log(), ready)

    def __enter__(self) -> Self:
        """Return the scheduler."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put away a step whose weights no engine was given any more."""
        if self.ledger.step is StepState.COMMITTED:
            self._put_away(self.ledger.version)

    # What subclasses do

    @abstractmethod
    def _wait_for_ready(self, groups: int) -> None:
        """Return once so many groups are leasable; nothing is locked."""

    @abstractmethod
    def _filled(self) -> None:
        """Hear that the open step has all its groups."""

    def _publish(self, version: int, digest: str = "") -> None:
        if self.ledger.step is StepState.COMMITTED:
            self.ledger.publish(digest)
            self._put_away(version)

    def _are_ready(self, groups: int) -> bool:
        return len(self.ledger.leasable()) >= groups

    def _draw_ahead(self) -> bool:
        """Draw the prompts of all steps that may be asked for now, and forget those behind; says whether any was new.

        A dropped group's place is taken by the next one, at last by one after the last step.
        """
        reach, n = self.ledger.reach, self.ledger.limits.groups_per_step
        return self._drawn.keep(range(reach.start // n + 1, -(-reach.stop // n) + 1))

    def _commit(self, token: Token, batch: BatchedDataDict) -> None:
        """Take an answered group; one that dynamic sampling does not train on is dropped, and the next one moves up."""
        if not self.ledger.commit(token, versions_of(batch, self.ledger.published), digest_of_group(batch)):
            return
        if (reason := self.draw.unused_for(batch)) is None:
            self.groups.put(token.position, batch)
            return
        self.ledger.unused(token.position, reason)
        self._pace.unused += 1
        self._unused.append((token.position, batch))
        ahead = self.ledger.limits.max_age + 1  # steps whose groups may be answered between two
        if self.most_unused is not None and self._pace.unused > self.most_unused * ahead:
            raise self._too_few_groups()

    def _too_few_groups(self) -> RunStoppedError:
        step, ready = self.ledger.version + 1, len(self.ledger.leasable())
        return RunStoppedError(
            f"step {step}: {self._pace.unused} groups have equal rewards, {ready} of the "
            f"{self.ledger.limits.groups_per_step} of a step (num_prompts_per_step) have not, and that is as many as "
            "dynamic_sampling_max_gen_batches and batch_multiplier allow: raise one of the two or "
            "num_generations_per_prompt, or set use_dynamic_sampling: false",
            code="too-few-groups",
        )

    def _give_up(self, reason: str) -> None:
        with self._changed:
            match self.ledger.step:
                case StepState.OPEN:
                    self.ledger.abort(reason)
                case StepState.FINISHING:
                    self.ledger.lost(reason)
                case StepState.IDLE | StepState.COMMITTED:
                    pass

    def _put_away(self, step: int) -> None:
        """Write the groups of a finished step down, and forget them, as far as that is asked for; raises FolderError.

        Not when it is finished: only what is recorded outlives a folder that cannot be written to.
        """
        if (archive := self.retention.archive) is not None:
            positions = sorted(position for chunk in self.ledger.chunks_of(step) for position in chunk)
            archive.keep(step, {position: self.groups.get(position) for position in positions})
        if not self.retention.until_checkpoint:
            self._forget(step)

    def _forget(self, step: int) -> None:
        self.ledger.forget(step)
        self.groups.forget_all_but(self.ledger.retained(step))
