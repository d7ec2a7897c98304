"""The training loop: what happens in a run, in order, and who does it.

A step is drawn and played when it is judged (`Algorithm.judge`), trained on (`Algorithm.update`), published,
validated, recorded and saved. Every part of it goes through `Recovery.surviving`: where ranks are lost meanwhile,
there others take their place, and the part is tried again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.recovery import Recovery, TimeLimit
from nemo_rl_mcore.driver.algorithms.run_checkpoints import (
    RunCheckpoints,
    SkipGuard,
    StepCheckpoint,
    TooManySkippedStepsError,
)
from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.observability import STARTUP_PREFIX, RunRecorder
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RunStoppedError


@dataclass
class TrainingLoop:
    """The loop over its parts.

    models: what it saves and restores, by the name of their folder. engine: what samples with the policy's weights; it
    is given them, and woken, before a step that samples and before a validation. frozen: models that are only asked.
    """

    config: RunConfig
    algorithm: Algorithm[Any]
    models: Mapping[str, Policy]
    engine: GenerationInterface
    observer: RunRecorder
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    frozen: Mapping[str, Policy] = field(default_factory=dict[str, Policy])

    def __post_init__(self) -> None:
        self._recovery = Recovery(
            *(self.config, self.algorithm, self.models, self.engine),
            *(self.observer, self.checkpoints, self.frozen),
        )
        self._guard = SkipGuard(self.config.max_consecutive_skips)
        self._limit = TimeLimit(self.config.checkpointing.must_save_by_s)
        self._awake = True
        """Whether the engine has the weights of the last step, and the memory that it may share with the ranks."""

    def run(self) -> None:
        for _ in self.steps():
            pass

    def steps(self) -> Generator[int]:
        """Train up to the loop's `max_num_steps`, from the first step or from where the checkpoints say.

        Yields each step when it is logged, and saved where a checkpoint is due. Where a signal, unless a second one
        follows, `checkpoint_must_save_by`, a RunStoppedError or the end of the generator stops the run, the last
        finished step is saved before it ends, if the ranks still hold its weights. A save that fails then is the cause
        of a stop that was no failure. Raises TooManySkippedStepsError, and saves nothing, after `max_consecutive_skips`
        skipped optimizer steps.
        """
        gc.collect()
        gc.freeze()  # what is there stays out of the collector's full passes, each of a fifth of a second
        try:
            with self._limit:
                behind = self._start()
                for step in range(behind + 1, self.config.loop.max_num_steps + 1):
                    current_stop_signals().stop_if_asked()
                    began = time.monotonic()
                    outcome = self._step(step)
                    self._limit.took(step=time.monotonic() - began)
                    self._guard.stop_if_too_many(step, outcome.batch)
                    if self.config.asynchronous:  # engines at work are not to wait for what comes next here
                        self._recovery.surviving(partial(self._publish, step))
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

    def _start(self) -> int:
        """Return how many steps are behind the run, whose weights models and engine then have."""
        behind, phase = self.checkpoints.resumed_step, self.observer.phase
        with nullcontext() if behind is None else phase(f"{STARTUP_PREFIX}restore"):
            counters = self.checkpoints.restore(self.models)
            self._guard = SkipGuard(self.config.max_consecutive_skips, **counters)
        on_ranks = self.config.policy.generation.decodes_on_ranks
        with nullcontext() if on_ranks else phase(f"{STARTUP_PREFIX}weights"):
            self._recovery.surviving(lambda: self.engine.update_weights(behind or 0))
        if self.config.loop.val_at_start and behind is None:
            self.observer.log(0, self._recovery.surviving(lambda: self.algorithm.validate(0)))
            self._awake = False
        return behind or 0

    def _step(self, step: int) -> StepOutcome:
        """Train, validate and record a step; what is finished of it is recorded, however it ends."""
        loop, surviving, row = self.config.loop, self._recovery.surviving, dict[str, float]()
        try:
            with ExitStack() as until_recorded:
                outcome = surviving(partial(self._train, step, until_recorded))
                self._awake = False
                self._guard.record(outcome.skip_reasons)
                row |= outcome.metrics
                row |= {"train/skipped_steps": self._guard.total, "train/empty_steps": self._guard.empty}
                self.checkpoints.finish(step, row, self._guard.counters())
                self._recovery.finished(step, row)
            at_end = step == loop.max_num_steps and loop.val_at_end
            if (loop.val_period and step % loop.val_period == 0) or at_end:
                row |= surviving(partial(self._validate, step))
            row |= self._recovery.metrics()
        finally:
            if row:
                with deferred_stop_signals(hold=True):
                    self.observer.log(step, row)
        return outcome

    def _train(self, step: int, until_recorded: ExitStack) -> StepOutcome:
        """Draw, play, judge, train; until_recorded: what is left when the step is recorded, or tried again.

        Up to the first change of a weight the step may be dropped; from then on a stop waits until it is recorded.
        """
        until_recorded.close()  # a stop that has waited for ranks to be brought back waits no longer
        if self.config.row_kind is RowKind.PROMPTS:
            if not self._awake:
                self._publish(step - 1)
        elif self._awake:
            self.engine.offload()
        with self.algorithm.open_step(step) as opened:
            judged = self.algorithm.judge(opened)
            until_recorded.enter_context(deferred_stop_signals())
            self.checkpoints.updating = True
            opened.finishing()
            return self.algorithm.update(opened, judged)

    def _publish(self, version: int) -> None:
        with self.observer.phase("weight_sync"):
            self.engine.update_weights(version)

    def _validate(self, step: int) -> dict[str, float]:
        self._publish(step)
        with self.observer.phase("validation"):
            return self.algorithm.validate(step)

    def _save_if_due(self, step: int) -> None:
        checkpoints, models, last = self.checkpoints, self.models, step == self.config.loop.max_num_steps

        def begin() -> StepCheckpoint | None:
            if checkpoints.unsaved:  # else it was begun before ranks were lost
                checkpoints.save_finished(models)
            return checkpoints.complete(models, wait=last)

        with deferred_stop_signals():
            if checkpoints.begun is not None:
                due = checkpoints.due(step)
                self._save(lambda: checkpoints.complete(models, wait=due))
            if checkpoints.due(step):
                self._save(begin)
        if not last:
            self._limit.stop_if_the_next_step_does_not_fit()

    def _save(self, part: Callable[[], StepCheckpoint | None]) -> None:
        with self.observer.phase("checkpoint"):  # of the step that follows
            completed = self._recovery.surviving(part)
        if completed is not None:
            for listener in (self.algorithm, self.observer):
                listener.checkpointed(completed.finished.step)
        took = None if completed is None else completed.seconds
        self._limit.took(save=took, saving=self.checkpoints.begun is not None)
