"""Survive failures of ranks: try again, or bring new ranks to where the old ones were, and go on.

Where a run does not survive, its last finished step is saved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepObserver, StepOutcome
from nemo_rl_mcore.driver.algorithms.run_checkpoints import NOT_WRITTEN, RunCheckpoints
from nemo_rl_mcore.driver.folders import too_full
from nemo_rl_mcore.driver.interfaces import GenerationInterface
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError, code_of, run_stopped_by
from nemo_rl_mcore.rank import activity

RESTARTS_KEY = "cluster.max_trainer_restarts"
_RETRIES = 2
_COMPARED = ("train/loss", "train/grad_norm", "value/loss", "value/grad_norm")
_SECOND_SIGNAL = "a second signal came before they were saved"


@dataclass
class Recovery:
    """Brings the models of a run back to its last finished step, whenever ranks fail and the recipe allows it.

    Ranks that raised have the step undone and are asked again, twice in a row at most. In place of ranks that died or
    hang there are new ones, `cluster.max_trainer_restarts` times in a run: all models go back to the last checkpoint,
    and the steps since then are trained again from the same answers. On CPU that gives the same bits.

    algorithm: trains steps again. models: what checkpoints hold, by name. engine: that answers with the policy's
    weights. frozen: models that are only asked.
    """

    config: RunConfig
    algorithm: Algorithm[Any]
    models: Mapping[str, Policy]
    engine: GenerationInterface
    observer: StepObserver
    checkpoints: RunCheckpoints
    frozen: Mapping[str, Policy]
    retries: int = field(default=0, init=False)
    """Parts of a step that were tried again on the ranks that had raised."""
    restarts: int = field(default=0, init=False)
    """Times that models went back to a checkpoint."""
    redone: int = field(default=0, init=False)
    """Steps that were trained again."""

    def __post_init__(self) -> None:
        self._all = {**self.models, **self.frozen}
        one_step = self.config.samples_per_step == self.config.policy.train_global_batch_size
        self._undone_by_abort = one_step and len(self.models) == 1
        """Whether to abort an update takes all of it back."""
        self._updates: dict[str, int] = {}
        """Of each model, when the last step was finished."""
        self._outcomes: dict[int, Mapping[str, float]] = {}

    def surviving[Result](self, part: Callable[[], Result]) -> Result:
        """Return what a part of a step gives, tried again after each failure that the run survives."""
        raised = 0
        while True:
            try:
                with self.observer.attempt():
                    return part()
            except RanksFailedError as error:
                if error.group not in self._all or error.final or _asked_to_stop():
                    raise
                if error.usable and raised == _RETRIES:
                    raise
                if error.usable and self._undo():
                    raised += 1
                    self.retries += 1
                    _log(error, f"it is tried again ({raised} of {_RETRIES})")
                else:
                    self._go_back(error)

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of how a step went, to compare it with what it may be when it is trained again."""
        self._outcomes[step] = {name: metrics[name] for name in _COMPARED if name in metrics}
        self._updates = {name: model.updates for name, model in self.models.items()}

    def checkpointed(self, step: int) -> None:
        """Take note that no step up to this one will be trained again."""
        self._outcomes = {one: outcome for one, outcome in self._outcomes.items() if one > step}

    def metrics(self) -> dict[str, float]:
        """Count what has happened since the start; empty where nothing has."""
        counted = {"retries": self.retries, "restarts": self.restarts, "redone_steps": self.redone}
        return {f"recovery/{name}": count for name, count in counted.items()} if any(counted.values()) else {}

    def _undo(self) -> bool:
        """Have the ranks as they were after the last finished step; false where an abort does not take back all."""
        if self.checkpoints.updating and not self._undone_by_abort:
            return False
        try:
            if not self._undone():
                return False
        except RanksFailedError:
            return False
        self.checkpoints.updating = False
        return True

    def _undone(self) -> bool:
        """Abort what is open; says whether the models are as the last finished step has left them."""
        for model in self.models.values():
            model.abort_train_step()
        return not any(
            model.updates != self._updates.get(name, 0) or model.has_unknown_update()
            for name, model in self.models.items()
        )

    def _go_back(self, error: RanksFailedError) -> None:
        """Bring all models to the last finished step by way of the last checkpoint, with new ranks where need be."""
        left = self.config.cluster.max_trainer_restarts
        while True:
            if self.restarts >= left:
                if self.restarts:
                    error.add_note(f"{RESTARTS_KEY}: {self.restarts} were used up")
                raise error
            self.restarts += 1
            with deferred_stop_signals():  # a first one waits for what is being written
                self.checkpoints.settle(self.models)
            saved = self.checkpoints.saved_step
            where = "its start" if saved is None else f"the checkpoint of step {saved}"
            _log(error, f"the run goes back to {where}, {left - self.restarts} left ({RESTARTS_KEY})")
            try:
                with activity.at("going back to the last checkpoint", timed=False), self.observer.redoing():
                    self._bring_back()
                return
            except RanksFailedError as again:
                if again.final or _asked_to_stop():
                    raise
                error = again

    def _bring_back(self) -> None:
        self.checkpoints.going_back = True  # to the end: however this fails, nobody saves what it leaves
        self.engine.offload()  # what shares the memory of new ranks
        self._replace_lost()
        saved = self.checkpoints.saved_step
        if saved is not None:
            self.checkpoints.restore(self.models)
        self.checkpoints.updating = False
        steps = range((saved or 0) + 1, self.checkpoints.finished_step + 1)
        unequal = [step for step in steps if self._differs(step, self.algorithm.redo(step))]
        self.checkpoints.going_back = False
        self._updates = {name: model.updates for name, model in self.models.items()}
        self.redone += len(steps)
        if steps:
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            how = f"not to the bit: {unequal} differ" if unequal else "with the same loss and gradient norm"
            write_line(sys.stderr, f"{which} trained again from the same rows, {how}")

    def _replace_lost(self) -> None:
        """Restart ranks of models that lack some or are stuck; of all that train where no checkpoint holds them."""
        fresh = self.models if self.checkpoints.saved_step is None else ()
        for name, model in self._all.items():
            lost = name in fresh or not model.serves()
            if not lost:
                try:
                    model.abort_train_step()
                except RanksFailedError:
                    lost = True
            if lost:
                model.restart()

    def _differs(self, step: int, outcome: StepOutcome) -> bool:
        """Compare a step with how it went first; no number is equal to no number, as the loss of a skipped step."""
        for name, before in self._outcomes[step].items():
            now = outcome.metrics.get(name)
            if now != before and not (now is not None and math.isnan(now) and math.isnan(before)):
                return True
        return False

    # The end of a run that was stopped

    def save_at_the_end(self, stop: BaseException) -> RunStoppedError | None:
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
        if (failure := self.settle()) is not None or not checkpoints.unsaved:
            return failure
        if code_of(reason) == NOT_WRITTEN and too_full(self.config):
            return None
        if checkpoints.updating and not self._undone_by_abort:
            checkpoints.note_failure("the step after them had begun to change the weights")
            return None
        if checkpoints.going_back:
            checkpoints.note_failure("the ranks were being brought back to them")
            return None
        with deferred_stop_signals():
            try:
                if not self._undone():
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

    def settle(self) -> RunStoppedError | None:
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


def _asked_to_stop() -> bool:
    signals = current_stop_signals()
    return signals.asked or signals.time_is_up


def _log(error: RanksFailedError, what: str) -> None:
    write_line(sys.stderr, f"{str(error).splitlines()[0]}; {what}")
