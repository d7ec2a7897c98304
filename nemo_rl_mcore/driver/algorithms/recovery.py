"""Survive failures of ranks: try again, or bring new ranks to where the old ones were, and go on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepObserver, StepOutcome
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.interfaces import TrainedModel
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RanksFailedError
from nemo_rl_mcore.rank import activity

RESTARTS_KEY = "cluster.max_trainer_restarts"
_RETRIES = 2
_COMPARED = ("train/loss", "train/grad_norm", "value/loss", "value/grad_norm")


@dataclass
class Recovery:
    """Brings the models of a run back to its last finished step, whenever ranks fail and the recipe allows it.

    Ranks that raised have the step undone and are asked again, twice in a row at most. In place of ranks that died or
    hang there are new ones, `restarts_left` times in a run: all models go back to the last checkpoint, and the steps
    since then are trained again from the same answers. On CPU that gives the same bits.

    models: what checkpoints hold, by name. frozen: models that are only asked. undone_by_abort: whether to abort an
    update takes all of it back.
    """

    models: Mapping[str, TrainedModel]
    frozen: Mapping[str, TrainedModel]
    checkpoints: RunCheckpoints
    observer: StepObserver
    restarts_left: int
    undone_by_abort: bool
    retries: int = field(default=0, init=False)
    """Parts of a step that were tried again on the ranks that had raised."""
    restarts: int = field(default=0, init=False)
    """Times that models went back to a checkpoint."""
    redone: int = field(default=0, init=False)
    """Steps that were trained again."""
    _updates: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """Of each model, when the last step was finished."""
    _outcomes: dict[int, Mapping[str, float]] = field(
        default_factory=dict[int, Mapping[str, float]], init=False
    )

    def surviving[Result](self, algorithm: Algorithm[Any], part: Callable[[], Result]) -> Result:
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
                if error.usable and self._undo(error, raised):
                    raised += 1
                else:
                    self._go_back(algorithm, error)

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of how a step went, to compare it with what it may be when it is trained again."""
        self._outcomes[step] = {name: metrics[name] for name in _COMPARED if name in metrics}
        self._count_updates()

    def checkpointed(self, step: int) -> None:
        """Take note that no step up to this one will be trained again."""
        self._outcomes = {one: outcome for one, outcome in self._outcomes.items() if one > step}

    @property
    def _all(self) -> Mapping[str, TrainedModel]:
        return {**self.models, **self.frozen}

    def metrics(self) -> dict[str, float]:
        """Count what has happened since the start; empty where nothing has."""
        counted = {"retries": self.retries, "restarts": self.restarts, "redone_steps": self.redone}
        return (
            {f"recovery/{name}": number for name, number in counted.items()} if any(counted.values()) else {}
        )

    def undone(self) -> bool:
        """Abort what is open; says whether the models are as the last finished step has left them."""
        for model in self.models.values():
            model.abort_train_step()
        return not any(
            model.updates != self._updates.get(name, 0) or model.has_unknown_update()
            for name, model in self.models.items()
        )

    def _count_updates(self) -> None:
        self._updates = {name: model.updates for name, model in self.models.items()}

    def _undo(self, error: RanksFailedError, raised: int) -> bool:
        """Have the ranks as they were after the last finished step; false where an abort does not take back all."""
        if self.checkpoints.updating and not self.undone_by_abort:
            return False
        try:
            if not self.undone():
                return False
        except RanksFailedError:
            return False
        self.checkpoints.updating = False
        self.retries += 1
        _log(error, f"it is tried again ({raised + 1} of {_RETRIES})")
        return True

    def _go_back(self, algorithm: Algorithm[Any], error: RanksFailedError) -> None:
        """Bring all models to the last finished step by way of the last checkpoint, with new ranks where need be."""
        while True:
            if not self.restarts_left:
                if self.restarts:
                    error.add_note(f"{RESTARTS_KEY}: {self.restarts} were used up")
                raise error
            self.restarts_left -= 1
            self.restarts += 1
            with deferred_stop_signals():  # a first one waits for what is being written
                self.checkpoints.settle(self.models)
            _log(error, f"the run goes back to {self._saved_as}, {self.restarts_left} left ({RESTARTS_KEY})")
            try:
                with activity.at("going back to the last checkpoint", timed=False), self.observer.redoing():
                    self._bring_back(algorithm)
                return
            except RanksFailedError as again:
                if again.final or _asked_to_stop():
                    raise
                error = again

    @property
    def _saved_as(self) -> str:
        saved = self.checkpoints.saved_step
        return "its start" if saved is None else f"the checkpoint of step {saved}"

    def _bring_back(self, algorithm: Algorithm[Any]) -> None:
        self.checkpoints.going_back = True  # to the end: however this fails, nobody saves what it leaves
        algorithm.collector.generation.offload()  # what shares the memory of new ranks
        self._replace_lost()
        saved = self.checkpoints.saved_step
        if saved is not None:
            self.checkpoints.restore(self.models)
        self.checkpoints.updating = False
        steps = range((saved or 0) + 1, self.checkpoints.finished_step + 1)
        unequal = [step for step in steps if self._differs(step, algorithm.redo(step))]
        self.checkpoints.going_back = False
        self._count_updates()
        self.redone += len(steps)
        _log_redone(steps, unequal)

    def _replace_lost(self) -> None:
        """Restart ranks of models that lack some or are stuck; of all that train where no checkpoint holds them."""
        fresh = self.models if self.checkpoints.saved_step is None else ()
        for name, model in self._all.items():
            if name in fresh or not model.serves() or not self._idle(model):
                model.restart()

    @staticmethod
    def _idle(model: TrainedModel) -> bool:
        try:
            model.abort_train_step()
        except RanksFailedError:
            return False
        return True

    def _differs(self, step: int, outcome: StepOutcome) -> bool:
        return any(
            not _equal(outcome.metrics.get(name), value) for name, value in self._outcomes[step].items()
        )


def _equal(one: float | None, other: float) -> bool:
    """Also two that are not numbers, as the loss of a step that was skipped may be."""
    return one == other or (one is not None and math.isnan(one) and math.isnan(other))


def _asked_to_stop() -> bool:
    signals = current_stop_signals()
    return signals.asked or signals.time_is_up


def _log(error: RanksFailedError, what: str) -> None:
    write_line(sys.stderr, f"{str(error).splitlines()[0]}; {what}")


def _log_redone(steps: Sequence[int], unequal: Sequence[int]) -> None:
    if not steps:
        return
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    equal = "with the same loss and gradient norm" if not unequal else f"not to the bit: {[*unequal]} differ"
    write_line(sys.stderr, f"{which} trained again from the same rows, {equal}")
