"""Leave behind what a run can go on from, as the section `checkpointing` asks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.folders import nearest_folder
from nemo_rl_mcore.driver.interfaces import TrainedModel
from nemo_rl_mcore.driver.saved_run import RECIPE_FILE, TOKENIZER_FOLDER
from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError, folder_error
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.checkpoints import Checkpoint, CheckpointStore

NOT_WRITTEN = "checkpoint-not-written"
"""The code of a checkpoint whose folder cannot be written to."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_FOLDERS = {
    *_FULL,
    *(
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ESTALE,
    ),
    *(errno.ENOENT, errno.ENOTDIR),
}
_FULL_BELOW = 1 << 20
# The line that ends a traceback, with the path if it has one.
_ERRNO = re.compile(r"^(?:[\w.]+: |rank \d+: )+\[Errno (\d+)\][^\n']*(?:'([^'\n]+)')?", re.MULTILINE)


@dataclass(frozen=True)
class FinishedStep:
    """A step whose update is done; its metrics may still be added to."""

    step: int
    metrics: Mapping[str, float]
    counters: Mapping[str, Any]


@dataclass(frozen=True)
class Completed:
    """A checkpoint that is there. seconds: that it took, in the background too."""

    step: int
    seconds: float


@dataclass
class _Begun:
    """A checkpoint that is being written; seconds for the copies, and for writing in the background."""

    finished: FinishedStep
    at: float
    copying_s: float = 0.0
    writing_s: float = 0.0

    def copied(self) -> None:
        self.copying_s = time.monotonic() - self.at


@dataclass
class RunCheckpoints:
    """The checkpoints of a run; without a store the run starts at its first step and leaves none.

    recipe: what is saved as config.yaml. start: the checkpoint to go on from. resume: the key of that name.
    tokenizer: what is saved with each checkpoint; None for the one that is built in. extra_parts: what else is, by the
    name of its folder: called with the folder, which it makes. in_background: models of which a save takes a copy.
    """

    store: CheckpointStore | None = None
    save_period: int = 1
    last_step: int = 0
    recipe: str = ""
    start: Checkpoint | None = None
    resume: str = "auto"
    tokenizer: Tokenizer | None = None
    extra_parts: dict[str, Callable[[Path], None]] = field(default_factory=dict[str, Callable[[Path], None]])
    in_background: frozenset[str] = frozenset()
    _finished: FinishedStep | None = field(default=None, init=False)
    _begun: _Begun | None = field(default=None, init=False)
    _saved: int | None = field(default=None, init=False)
    _tried: int | None = field(default=None, init=False)
    _overdue: bool = field(default=False, init=False)
    """Whether a checkpoint that was due is not there."""
    updating: bool = field(default=False, init=False)
    """Whether weights change, by a step that is not finished."""
    going_back: bool = field(default=False, init=False)
    """Whether the weights are, or may be, those of a step before the last finished one, which is trained again."""
    _failure: str = field(default="", init=False)

    @property
    def resumed_step(self) -> int | None:
        """Return the last step that is behind the run, if it goes on from a checkpoint."""
        return self.start.step if self.start is not None else None

    @property
    def nothing_left(self) -> bool:
        """Say whether the run goes on from a checkpoint of its last step, or of a later one."""
        return self.start is not None and self.start.step >= self.last_step

    @property
    def unsaved(self) -> bool:
        """Say whether there is a finished step with a place, whose save was not tried, or met a full disk."""
        return self.store is not None and self._finished is not None and self._finished.step != self._tried

    @property
    def begun(self) -> bool:
        """Say whether a checkpoint was begun that is not complete."""
        return self._begun is not None

    @property
    def saved_step(self) -> int | None:
        """Return the step of the checkpoint that `restore` goes back to: the run's last one, else where it began."""
        return self._saved if self._saved is not None else self.resumed_step

    @property
    def finished_step(self) -> int:
        """Return the last step whose update is done, be it before the run began."""
        return self._finished.step if self._finished is not None else self.resumed_step or 0

    def restore(self, models: Mapping[str, TrainedModel]) -> Mapping[str, Any]:
        """Set the models back to the last checkpoint; returns the counters that the run began with."""
        if (folder := self._last_folder) is not None:
            for name, model in models.items():
                model.load_checkpoint(str((folder / name).absolute()))
        return self.start.counters if self.start is not None else {}

    @property
    def _last_folder(self) -> Path | None:
        if self.store is not None and self._saved is not None:
            return self.store.root / f"step_{self._saved}"
        return self.start.folder if self.start is not None else None

    def due(self, step: int) -> bool:
        """Say whether a checkpoint is to follow this step."""
        on_time = step % self.save_period == 0 or step == self.last_step
        return self.store is not None and (on_time or self._overdue)

    def begin_update(self) -> None:
        """Take note that the next step changes the weights from now on."""
        self.updating = True

    def finish(self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]) -> None:
        """Take note of a step whose update is done."""
        self._finished = FinishedStep(step, metrics, counters)
        self.updating = False

    def save_finished(self, models: Mapping[str, TrainedModel]) -> None:
        """Begin the checkpoint of the step that was finished last, which `complete` completes.

        The data needs no position: prompts are drawn by (seed, step). Of the models `in_background` a copy is taken.
        Raises RunStoppedError, naming the folder and why, when it cannot be written to; nothing is then left of it.
        """
        assert self.store is not None
        assert self._finished is not None
        finished = self._finished
        self._tried, self._overdue = finished.step, False
        self._begun = _Begun(finished, time.monotonic())
        with activity.at(f"saving step {finished.step}", timed=False), self._whole_or_nothing(models):
            folder = self.store.begin(finished.step)
            (folder / RECIPE_FILE).write_text(self.recipe, encoding="utf-8")
            if self.tokenizer is not None:
                self.tokenizer.save_as_hugging_face(folder / TOKENIZER_FOLDER)
            for name, write in self.extra_parts.items():
                write(folder / name)
            for name, model in models.items():
                (folder / name).mkdir()
                model.save_checkpoint(str(folder / name), wait=name not in self.in_background)
            self._begun.copied()

    def complete(self, models: Mapping[str, TrainedModel], *, wait: bool) -> Completed | None:
        """Make a checkpoint of what was begun, if it is written; wait: until it is. None: nothing was, or it is not.

        Raises as `save_finished` does, and what a model raises that could not write.
        """
        if (begun := self._begun) is None:
            return None
        assert self.store is not None
        step = begun.finished.step
        with activity.at(f"saving step {step}", timed=False), self._whole_or_nothing(models):
            for name in self.in_background:
                written_s = models[name].checkpoint_written(wait=wait)
                if written_s is None:
                    return None
                begun.writing_s = max(begun.writing_s, written_s)
            committing = time.monotonic()
            self.store.commit(step, begun.finished.metrics, begun.finished.counters)
        self._begun, self._saved = None, step
        return Completed(step, begun.copying_s + begun.writing_s + time.monotonic() - committing)

    def settle(self, models: Mapping[str, TrainedModel]) -> None:
        """Complete what was begun, or drop it where ranks that write it are lost: others are to take their place."""
        with suppress(RanksFailedError):
            self.complete(models, wait=True)

    @contextmanager
    def _whole_or_nothing(self, models: Mapping[str, TrainedModel]) -> Generator[None]:
        """Leave nothing of the checkpoint when the block raises, and have it made up for; see `save_finished`."""
        assert self.store is not None
        assert self._begun is not None
        step = self._begun.finished.step
        try:
            yield
        except BaseException as error:
            # While the disk is as full as it was.
            of_folder = isinstance(error, (OSError, RunStoppedError))
            reason = error_of_the_folder(error, self.store.root) if of_folder else None
            self._drop(models)
            if reason is None:
                raise
            self._tried = None if reason.errno in _FULL else step
            failure = folder_error(
                "checkpointing.checkpoint_dir", self.store.root, reason, "make room, or name another"
            )
            raise RunStoppedError(f"{failure}; saving step {step} failed", code=NOT_WRITTEN) from error

    def _drop(self, models: Mapping[str, TrainedModel]) -> None:
        assert self.store is not None
        assert self._begun is not None
        for name in self.in_background & models.keys():  # who still writes is not to do so into the next one
            with suppress(RunStoppedError):
                if models[name].serves() and not current_stop_signals().insisted:
                    models[name].checkpoint_written(wait=True)
        self.store.drop(self._begun.finished.step)
        self._begun, self._tried, self._overdue = None, None, True

    def note_failure(self, why: str) -> None:
        """Take note of why the last finished step is not saved."""
        self._failure = why

    def standing(self) -> str:
        """Return what is kept of the weights, what is lost, and how the run goes on: for how it ended."""
        saved = self.saved_step
        parts: list[str] = []
        if self._finished is None:
            parts.append("no step was finished")
        elif (last := self._finished.step) != saved:
            first = (saved or 0) + 1
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            why = "checkpointing.enabled is false" if self.store is None else self._failure
            parts.append(f"the weights of {steps} are lost" + (f" ({why})" if why else ""))
        if self.store is not None and saved is not None:
            how = "" if self.resume in ("auto", "must") else " with checkpointing.resume=auto"
            parts.append(
                f"step {saved} is saved in {self._last_folder}, and the same command{how} goes on from there"
            )
        return "; ".join(parts)


def error_of_the_folder(error: BaseException, folder: Path) -> OSError | None:
    """Return the OSError behind an error, also one that a rank raised: a disk that is full, a folder that is missing.

    A rank that died, or did not return, has raised none; what it has written to its standard error is not asked.
    """
    if isinstance(error, OSError):
        return error
    if getattr(error, "cause", error) is None:
        return None
    numbers = [
        int(number)
        for number, path in _ERRNO.findall(str(error))
        if not path or Path(path).is_relative_to(folder.absolute())
    ]
    if shutil.disk_usage(nearest_folder(folder)).free < _FULL_BELOW:
        numbers.append(errno.ENOSPC)  # of which torch's writer says "unexpected pos"
    return next((OSError(number, os.strerror(number)) for number in numbers if number in _OF_FOLDERS), None)
