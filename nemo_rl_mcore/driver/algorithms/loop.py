"""Run a training run's steps, each part in order.

Each step draws prompts, plays them, scores the answers (`Algorithm.judge`) and trains on them (`Algorithm.update`);
then it is validated, recorded, published and saved. Every part runs inside `Recovery.surviving`: if ranks are lost,
they are replaced, and the part is tried again.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.cluster import seconds_of
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.run_checkpoints import (
    NOT_WRITTEN,
    RunCheckpoints,
    SkipGuard,
    StepCheckpoint,
    TooManySkippedStepsError,
)
from nemo_rl_mcore.driver.observability import STARTUP_PREFIX, RunRecorder
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface
from nemo_rl_mcore.driver.run_folder import too_full
from nemo_rl_mcore.driver.signals import TimeLimitReachedError, current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError, code_of, run_stopped_by

RESTARTS_KEY = "cluster.max_trainer_restarts"
_RETRIES = 2
_COMPARED = ("train/loss", "train/grad_norm", "value/loss", "value/grad_norm")
_SECOND_SIGNAL = "a second signal came before they were saved"


@dataclass
class TrainingLoop:
    """The training loop.

    models: the models to train, save and restore, by folder name. engine: samples with the policy's weights, which
    it receives before each step that samples and before each validation. frozen: models that are not trained.
    """

    config: RunConfig
    algorithm: Algorithm[Any]
    models: Mapping[str, Policy]
    engine: GenerationInterface
    observer: RunRecorder
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    frozen: Mapping[str, Policy] = field(default_factory=dict[str, Policy])

    def __post_init__(self) -> None:
        self._recovery = Recovery(self)
        self._guard = SkipGuard(self.config.max_consecutive_skips)
        self._limit = TimeLimit(seconds_of(self.config.checkpointing.checkpoint_must_save_by))
        self._awake = True
        """True while the engine holds the last step's weights and occupies any memory that it shares with the ranks."""

    def steps(self) -> Generator[int]:
        """Train from the first step, or from the checkpoint to resume from, up to the loop's `max_num_steps`.

        Yields each step number once the step is logged and, if a checkpoint is due, saved. If the run is stopped by a
        signal, the time limit `checkpoint_must_save_by`, a RunStoppedError or the generator's end, the last finished
        step is saved first, provided that the ranks still hold its weights; a second signal prevents this save. If the
        save fails after a KeyboardInterrupt, its error becomes that interrupt's cause. Raises TooManySkippedStepsError,
        without this save, after `max_consecutive_skips` skipped optimizer steps.
        """
        loop, surviving, phase = self.config.loop, self._recovery.surviving, self.observer.phase
        gc.collect()
        gc.freeze()  # keeps startup objects out of full garbage collections, which take 0.2 s each
        try:
            with ExitStack() as limited:
                limited.callback(self._limit.signals.limit_time, None)
                self._limit.took()
                behind = self.checkpoints.resumed_step
                with nullcontext() if behind is None else phase(f"{STARTUP_PREFIX}restore"):
                    counters = self.checkpoints.restore(self.models)
                    self._guard = SkipGuard(self.config.max_consecutive_skips, **counters)
                on_ranks = self.config.policy.generation.decodes_on_ranks
                with nullcontext() if on_ranks else phase(f"{STARTUP_PREFIX}weights"):
                    surviving(lambda: self.engine.update_weights(behind or 0))
                if loop.val_at_start and behind is None:
                    self.observer.log(0, surviving(lambda: self.algorithm.validate(0)))
                    self._awake = False
                for step in range((behind or 0) + 1, loop.max_num_steps + 1):
                    current_stop_signals().stop_if_asked()
                    began = time.monotonic()
                    outcome = self._step(step)
                    self._limit.took(step=time.monotonic() - began)
                    self._guard.stop_if_too_many(step, outcome.batch)
                    if self.config.asynchronous:  # busy engines should not wait for the save
                        surviving(partial(self._publish, step))
                    self._save_if_due(step)
                    yield step
        except TooManySkippedStepsError:
            self._recovery.settle()
            raise
        except (RunStoppedError, GeneratorExit) as error:
            self._recovery.save_at_the_end(error)
            raise
        except KeyboardInterrupt as stop:
            if (failure := self._recovery.save_at_the_end(stop)) is not None:
                raise stop from failure
            raise
        finally:
            gc.unfreeze()

    def _step(self, step: int) -> StepOutcome:
        """Run and record one step; a step that was trained is recorded even if its validation fails."""
        loop, surviving, row = self.config.loop, self._recovery.surviving, dict[str, float]()

        def train() -> StepOutcome:
            until_recorded.close()  # let through a stop that was deferred while ranks were brought back
            samples = self.config.row_kind is RowKind.PROMPTS
            if samples and not self._awake:
                self._publish(step - 1)
            elif self._awake and not samples:
                self.engine.offload()
            with self.algorithm.open_step(step) as opened:
                judged = self.algorithm.judge(opened)
                # No weight has changed yet, so the step may still be dropped. From here on, stops wait for the record.
                until_recorded.enter_context(deferred_stop_signals())
                self.checkpoints.updating = True
                opened.finishing()
                return self.algorithm.update(opened, judged)

        def validate() -> dict[str, float]:
            self._publish(step)
            with self.observer.phase("validation"):
                return self.algorithm.validate(step)

        try:
            with ExitStack() as until_recorded:
                outcome = surviving(train)
                self._awake = False
                self._guard.record(outcome.skip_reasons)
                row |= outcome.metrics
                row |= {"train/skipped_steps": self._guard.total, "train/empty_steps": self._guard.empty}
                self.checkpoints.finish(step, row, self._guard.counters())
                self._recovery.finished(step, row)
            last = step == loop.max_num_steps
            if (loop.val_period and step % loop.val_period == 0) or (last and loop.val_at_end):
                row |= surviving(validate)
            recovery = self._recovery
            recovered = {
                "retries": recovery.retries,
                "restarts": recovery.restarts,
                "redone_steps": recovery.redone,
            }
            if any(recovered.values()):
                row |= {f"recovery/{name}": count for name, count in recovered.items()}
        finally:
            if row:
                with deferred_stop_signals(hold=True):
                    self.observer.log(step, row)
        return outcome

    def _publish(self, version: int) -> None:
        with self.observer.phase("weight_sync"):
            self.engine.update_weights(version)

    def _save_if_due(self, step: int) -> None:
        last = step == self.config.loop.max_num_steps
        with deferred_stop_signals():
            if self.checkpoints.begun is not None:  # an earlier step's, being written in the background
                self._save(wait=self.checkpoints.due(step))
            if self.checkpoints.due(step):
                self._save(wait=last, begin=True)
        if not last:
            self._limit.stop_if_the_next_step_does_not_fit()

    def _save(self, *, wait: bool, begin: bool = False) -> None:
        """Continue the checkpoint that is being written, or begin one. wait: True to wait until it is complete."""
        checkpoints, models = self.checkpoints, self.models

        def save() -> StepCheckpoint | None:
            if begin and checkpoints.unsaved:  # a retry after lost ranks may find it already begun
                checkpoints.save_finished(models)
            return checkpoints.complete(models, wait=wait)

        with self.observer.phase("checkpoint"):  # its time counts toward the next step
            completed = self._recovery.surviving(save)
        if completed is not None:
            for listener in (self.algorithm, self.observer):
                listener.checkpointed(completed.step)
        took = None if completed is None else completed.seconds
        self._limit.took(save=took, saving=checkpoints.begun is not None)


class Recovery:
    """Brings a loop's models back to the last finished step after ranks fail, if the recipe allows it.

    If ranks raised, the step is undone and tried again on the same ranks, at most twice in a row. If ranks died or
    hang, they are replaced, at most `cluster.max_trainer_restarts` times per run: all models return to the last
    checkpoint, and the steps since then are trained again from the same answers. On CPU, the result is bit-identical.

    retries: number of times that part of a step was tried again on ranks that had raised. restarts: number of times
    that models returned to a checkpoint. redone: number of steps that were trained again.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop, config = loop, loop.config
        self.retries = self.restarts = self.redone = 0
        self._models = {**loop.models, **loop.frozen}
        one_step = config.samples_per_step == config.policy.train_global_batch_size
        self._undone_by_abort = one_step and len(loop.models) == 1
        """True if aborting an update undoes all of it."""
        self._updates: dict[str, int] = {}
        """Each model's number of updates at the end of the last finished step."""
        self._outcomes: dict[int, Mapping[str, float]] = {}

    def surviving[Result](self, part: Callable[[], Result]) -> Result:
        """Return the result of a part of a step, trying again after each failure that the run can survive."""
        raised, checkpoints = 0, self.loop.checkpoints
        while True:
            try:
                with self.loop.observer.attempt():
                    return part()
            except RanksFailedError as error:
                if error.group not in self._models or error.final or current_stop_signals().stopping:
                    raise
                if error.usable and raised == _RETRIES:
                    raise
                undone = False  # stays False if an abort does not undo everything
                if error.usable and (self._undone_by_abort or not checkpoints.updating):
                    with suppress(RanksFailedError):
                        undone = self._undone()
                if not undone:
                    self._go_back(error)
                    continue
                checkpoints.updating = False
                raised += 1
                self.retries += 1
                told = f"it is tried again ({raised} of {_RETRIES})"
                write_line(sys.stderr, f"{_first_line(error)}; {told}")

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember a finished step's results until a checkpoint contains the step."""
        saved = self.loop.checkpoints.resumed_step or 0
        self._outcomes = {one: outcome for one, outcome in self._outcomes.items() if one > saved}
        self._outcomes[step] = {name: metrics[name] for name in _COMPARED if name in metrics}
        self._updates = {name: model.updates for name, model in self.loop.models.items()}

    def _undone(self) -> bool:
        """Abort the open step; return True if the models are as the last finished step left them."""
        models = self.loop.models
        for model in models.values():
            model.abort_train_step()
        return not any(
            model.updates != self._updates.get(name, 0) or model.has_unknown_update()
            for name, model in models.items()
        )

    def _go_back(self, error: RanksFailedError) -> None:
        """Bring all models to the last finished step from the last checkpoint, with new ranks where necessary."""
        checkpoints, left = self.loop.checkpoints, self.loop.config.cluster.max_trainer_restarts
        while True:
            if self.restarts >= left:
                if self.restarts:
                    error.add_note(f"{RESTARTS_KEY}: {self.restarts} were used up")
                raise error
            self.restarts += 1
            with deferred_stop_signals():  # a first signal waits for the checkpoint that is being written
                checkpoints.settle(self.loop.models)
            saved = checkpoints.resumed_step
            where = "its start" if saved is None else f"the checkpoint of step {saved}"
            told = f"the run goes back to {where}, {left - self.restarts} left ({RESTARTS_KEY})"
            write_line(sys.stderr, f"{_first_line(error)}; {told}")
            try:
                going_back = activity.at("going back to the last checkpoint", timed=False)
                with going_back, self.loop.observer.redoing():
                    self._bring_back()
                return
            except RanksFailedError as again:
                if again.final or current_stop_signals().stopping:
                    raise
                error = again

    def _bring_back(self) -> None:
        loop, checkpoints = self.loop, self.loop.checkpoints
        checkpoints.going_back = True  # stays set after a failure: such models must not be saved
        loop.engine.offload()  # it may occupy memory that new ranks need
        saved = checkpoints.resumed_step
        for name, model in self._models.items():
            # Restart models that lack ranks or are stuck and, if there is no checkpoint, all trained models.
            lost = (saved is None and name in loop.models) or not model.serves()
            if not lost:
                try:
                    model.abort_train_step()
                except RanksFailedError:
                    lost = True
            if lost:
                model.restart()
        if saved is not None:
            checkpoints.restore(loop.models)
        checkpoints.updating = False
        finished = checkpoints.resumed_step if checkpoints.finished is None else checkpoints.finished.step
        steps, unequal = range((saved or 0) + 1, (finished or 0) + 1), list[int]()
        for step in steps:
            again = loop.algorithm.redo(step).metrics
            for name, before in self._outcomes[step].items():
                now = again.get(name)
                # NaN, as in the loss of a skipped step, counts as equal to NaN.
                if now != before and not (now is not None and math.isnan(now) and math.isnan(before)):
                    unequal.append(step)
                    break
        checkpoints.going_back = False
        self._updates = {name: model.updates for name, model in loop.models.items()}
        self.redone += len(steps)
        if steps:
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            how = f"not to the bit: {unequal} differ" if unequal else "with the same loss and gradient norm"
            write_line(sys.stderr, f"{which} trained again from the same rows, {how}")

    # The end of a run that was stopped

    def save_at_the_end(self, stop: BaseException) -> RunStoppedError | None:
        """Save the last finished step, unless a save was already tried; return the error if the save fails.

        If nothing is saved, sets `RunCheckpoints.failure` to the reason.
        """
        loop, checkpoints, reason = self.loop, self.loop.checkpoints, run_stopped_by(stop)
        checkpoints.failure = _first_line(reason)
        try:
            if current_stop_signals().insisted:
                checkpoints.failure = _SECOND_SIGNAL
                return None
            if (failure := self.settle()) is not None or not checkpoints.unsaved:
                return failure
            if code_of(reason) == NOT_WRITTEN and too_full(loop.config):
                return None
            if checkpoints.updating and not self._undone_by_abort:
                checkpoints.failure = "the step after them had begun to change the weights"
                return None
            if checkpoints.going_back:
                checkpoints.failure = "the ranks were being brought back to them"
                return None
            with deferred_stop_signals():
                try:
                    if not self._undone():
                        checkpoints.failure = "the step after them has changed the weights"
                        return None
                    reason = None
                    if loop.config.policy.offload != "none":
                        with suppress(RunStoppedError):  # lost engines have already freed the memory
                            loop.engine.offload()
                    checkpoints.save_finished(loop.models)
                    checkpoints.complete(loop.models, wait=True)
                except RunStoppedError as error:
                    checkpoints.failure = _first_line(reason or error)
                    return error
            return None
        except KeyboardInterrupt:
            checkpoints.failure = _SECOND_SIGNAL
            raise

    def settle(self) -> RunStoppedError | None:
        """Complete the checkpoint that was begun; return an error if its folder cannot be written to."""
        with deferred_stop_signals():
            try:
                self.loop.checkpoints.settle(self.loop.models)
            except RunStoppedError as error:
                self.loop.checkpoints.failure = _first_line(error)
                return error
        return None


class TimeLimit:
    """Ends a run early enough to save its last step, judging by how long steps and saves have taken so far.

    seconds: time from the start of the process's command to the end of the save; None for no limit. Until a save has
    been timed, it is assumed to take as long as the longest step.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.signals = current_stop_signals()
        self._longest_step = 0.0
        self._saves_s = 0.0
        self._saves_at_the_end = 1
        self._longest_save: float | None = None

    def took(self, *, step: float = 0.0, save: float | None = None, saving: bool | None = None) -> None:
        """Record the seconds that a step, including its validation, or a save has taken, and adjust the limit.

        saving: True while a save is in progress, which must end before another one can begin.
        """
        self._longest_step = max(self._longest_step, step)
        if save is not None:
            self._longest_save = max(self._longest_save or 0.0, save)
        if saving is not None:
            self._saves_at_the_end = 2 if saving else 1
        one_save = self._longest_step if self._longest_save is None else self._longest_save
        self._saves_s = self._saves_at_the_end * one_save
        if self.seconds is not None:
            self.signals.limit_time(self.seconds - self._saves_s)

    def stop_if_the_next_step_does_not_fit(self) -> None:
        passed = time.monotonic() - self.signals.began
        if self.seconds is not None and passed + self._longest_step + self._saves_s >= self.seconds:
            self.signals.time_is_up = True
            raise TimeLimitReachedError


def _first_line(error: RunStoppedError | None) -> str:
    return str(error or "").partition("\n")[0]
