"""The loop that all algorithms share: a step, validation, the records, the checkpoint; then the next step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepObserver, StepOutcome
from nemo_rl_mcore.driver.algorithms.recovery import Recovery
from nemo_rl_mcore.driver.algorithms.run_checkpoints import NOT_WRITTEN, Completed, RunCheckpoints
from nemo_rl_mcore.driver.algorithms.skip_guard import SkipGuard, TooManySkippedStepsError
from nemo_rl_mcore.driver.algorithms.time_limit import TimeLimit
from nemo_rl_mcore.driver.folders import too_full
from nemo_rl_mcore.driver.interfaces import GenerationInterface, TrainedModel
from nemo_rl_mcore.driver.observability import STARTUP_PREFIX
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RunStoppedError, code_of, run_stopped_by

_SECOND_SIGNAL = "a second signal came before they were saved"


@dataclass(frozen=True)
class TrainingLoop:
    """The loop over its parts.

    models: what it saves and restores, by the name of their folder. engine: what samples with the policy's weights; it
    is given them, and woken, before a step that samples and before a validation. frozen: models that are only asked.
    """

    config: RunConfig
    models: Mapping[str, TrainedModel]
    engine: GenerationInterface
    observer: StepObserver
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    frozen: Mapping[str, TrainedModel] = field(default_factory=dict[str, TrainedModel])

    def run(self, algorithm: Algorithm[Any]) -> None:
        """Take all `steps`."""
        for _ in self.steps(algorithm):
            pass

    def steps(self, algorithm: Algorithm[Any]) -> Generator[int]:
        """Train up to the loop's `max_num_steps`, from the first step or from where the checkpoints say.

        Yields the number of each step when it is finished, logged, and saved where a checkpoint is due. Where a signal,
        unless a second one follows, `checkpoint_must_save_by`, a RunStoppedError or the end of the generator stops the
        run, the last finished step is saved before it ends, if the ranks still serve and hold its weights. A save that
        fails then is the cause of a stop that was no failure.
        Raises TooManySkippedStepsError, and saves nothing, when `max_consecutive_skips` optimizer steps in a row were
        skipped.
        """
        try:
            yield from self._steps(algorithm)
        except TooManySkippedStepsError:
            self._settle()
            raise
        except (RunStoppedError, GeneratorExit) as error:
            self._save_at_the_end(error)
            raise
        except KeyboardInterrupt as stop:
            if (failure := self._save_at_the_end(stop)) is not None:
                raise stop from failure
            raise

    def _steps(self, algorithm: Algorithm[Any]) -> Generator[int]:
        behind = self.checkpoints.resumed_step
        with self._startup("restore", needed=behind is not None):
            guard = SkipGuard(self.config.max_consecutive_skips, **self.checkpoints.restore(self.models))
        survive = partial(self._recovery.surviving, algorithm)
        with TimeLimit(self.config.checkpointing.must_save_by_s) as limit, _settled_heap():
            with self._startup("weights", needed=not self.config.policy.generation.decodes_on_ranks):
                survive(lambda: self.engine.update_weights(behind or 0))
            awake = True
            if self.config.loop.val_at_start and behind is None:
                self.observer.log(0, survive(lambda: algorithm.validate(0)))
                awake = False
            for step in range((behind or 0) + 1, self.config.loop.max_num_steps + 1):
                current_stop_signals().stop_if_asked()
                with limit.step():
                    outcome = self._step(algorithm, step, guard, awake=awake)
                awake = False
                guard.stop_if_too_many(step, outcome.batch)
                if self.config.asynchronous:
                    survive(
                        partial(self._wake, step)
                    )  # engines at work are not to wait for what comes next here
                self._save_if_due(algorithm, step, limit)
                yield step

    @cached_property
    def _recovery(self) -> Recovery:
        one_step = self.config.samples_per_step == self.config.policy.train_global_batch_size
        return Recovery(
            self.models,
            self.frozen,
            self.checkpoints,
            self.observer,
            self.config.cluster.max_trainer_restarts,
            undone_by_abort=one_step and len(self.models) == 1,
        )

    def _startup(self, part: str, *, needed: bool) -> AbstractContextManager[None]:
        """Time a part of the start, apart from the first step."""
        return self.observer.phase(f"{STARTUP_PREFIX}{part}") if needed else nullcontext()

    def _save_if_due(self, algorithm: Algorithm[Any], step: int, limit: TimeLimit) -> None:
        checkpoints, last = self.checkpoints, step == self.config.loop.max_num_steps
        with deferred_stop_signals():
            if checkpoints.begun:
                self._surviving_a_save(algorithm, limit, partial(self._complete, wait=checkpoints.due(step)))
            if checkpoints.due(step):
                self._surviving_a_save(algorithm, limit, partial(self._save, wait=last))
        if not last:
            limit.stop_if_the_next_step_does_not_fit()

    def _save(self, *, wait: bool) -> Completed | None:
        """Save the finished step, unless that was begun; wait: until it is complete, however often it is begun."""
        if self.checkpoints.unsaved:
            self.checkpoints.save_finished(self.models)
        return self._complete(wait=wait)

    def _complete(self, *, wait: bool) -> Completed | None:
        return self.checkpoints.complete(self.models, wait=wait)

    def _surviving_a_save(
        self, algorithm: Algorithm[Any], limit: TimeLimit, part: Callable[[], Completed | None]
    ) -> None:
        with self.observer.phase("checkpoint"):  # of the step that follows
            completed = self._recovery.surviving(algorithm, part)
        if completed is not None:
            limit.saved(completed.seconds)
            algorithm.checkpointed(completed.step)
            self._recovery.checkpointed(completed.step)
            self.observer.checkpointed(completed.step)
        limit.saving(self.checkpoints.begun)

    def _wake_for(self, step: int, *, awake: bool) -> None:
        """Leave the engine awake for a step that samples, asleep for one that is given its answers."""
        if self.config.row_kind is not RowKind.PROMPTS:
            if awake:
                self.engine.offload()
        elif not awake:
            self._wake(step - 1)

    def _wake(self, version: int) -> None:
        with self.observer.phase("weight_sync"):
            self.engine.update_weights(version)

    def _step(self, algorithm: Algorithm[Any], step: int, guard: SkipGuard, *, awake: bool) -> StepOutcome:
        loop, recovery = self.config.loop, self._recovery
        with self._row_of(step) as row:
            with ExitStack() as until_recorded:

                def begin_update() -> None:
                    until_recorded.enter_context(deferred_stop_signals())
                    self.checkpoints.begin_update()

                def train() -> StepOutcome:
                    until_recorded.close()  # a stop that has waited for ranks to be brought back waits no longer
                    self._wake_for(step, awake=awake)
                    return algorithm.step(step, begin_update)

                outcome = recovery.surviving(algorithm, train)
                guard.record(outcome.skip_reasons)
                row |= outcome.metrics
                row |= {"train/skipped_steps": guard.total, "train/empty_steps": guard.empty}
                self.checkpoints.finish(step, row, guard.counters())
                recovery.finished(step, row)
            last = step == loop.max_num_steps
            if (loop.val_period and step % loop.val_period == 0) or (last and loop.val_at_end):
                row |= recovery.surviving(algorithm, partial(self._validate, algorithm, step))
            row |= recovery.metrics()
        return outcome

    def _validate(self, algorithm: Algorithm[Any], step: int) -> dict[str, float]:
        self._wake(step)
        with self.observer.phase("validation"):
            return algorithm.validate(step)

    @contextmanager
    def _row_of(self, step: int) -> Generator[dict[str, float]]:
        """Hold the metrics of a step, and log them once it is finished, however the block ends."""
        row: dict[str, float] = {}
        try:
            yield row
        finally:
            if row:
                with deferred_stop_signals(hold=True):
                    self.observer.log(step, row)

    def _save_at_the_end(self, stop: BaseException) -> RunStoppedError | None:
        """Save the last finished step, unless that was done or tried; the checkpoints report why it cannot be.

        Returns what the attempt failed with.
        """
        reason = run_stopped_by(stop)
        self.checkpoints.note_failure(_first_line(reason))
        try:
            if not current_stop_signals().insisted:
                return self._save_after(reason)
        except KeyboardInterrupt:
            self.checkpoints.note_failure(_SECOND_SIGNAL)
            raise
        self.checkpoints.note_failure(_SECOND_SIGNAL)
        return None

    def _save_after(self, reason: RunStoppedError | None) -> RunStoppedError | None:
        """Do so; reason: why the run ends, and the ranks no longer serve, if they do not."""
        checkpoints = self.checkpoints
        self.observer.give_back_room()  # weights come first, the page has what they leave
        if (failure := self._settle()) is not None or not checkpoints.unsaved:
            return failure
        if code_of(reason) == NOT_WRITTEN and too_full(self.config):
            return None
        if checkpoints.updating and not self._recovery.undone_by_abort:
            checkpoints.note_failure("the step after them had begun to change the weights")
            return None
        if checkpoints.going_back:
            checkpoints.note_failure("the ranks were being brought back to them")
            return None
        with deferred_stop_signals():
            try:
                if not self._recovery.undone():
                    checkpoints.note_failure("the step after them has changed the weights")
                    return None
                reason = None
                if self.config.policy.offload != "none":
                    with suppress(
                        RunStoppedError
                    ):  # lost ones have left the room that the ranks need to save
                        self.engine.offload()
                checkpoints.save_finished(self.models)
                checkpoints.complete(self.models, wait=True)
            except RunStoppedError as error:
                checkpoints.note_failure(_first_line(reason or error))
                return error
        return None

    def _settle(self) -> RunStoppedError | None:
        """Complete the checkpoint that was begun, at the end; returns why its folder cannot be written to."""
        with deferred_stop_signals():
            try:
                self.checkpoints.settle(self.models)
            except RunStoppedError as error:
                self.checkpoints.note_failure(_first_line(error))
                return error
        return None


def _first_line(error: RunStoppedError | None) -> str:
    return str(error or "").partition("\n")[0]


@contextmanager
def _settled_heap() -> Generator[None]:
    """Keep what is there at the start out of the collector's full passes, each of which takes a fifth of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
