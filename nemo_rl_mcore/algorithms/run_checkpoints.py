"""Find where a run begins, and leave behind what to begin from, as the section `checkpointing` asks."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_mcore import activity
from nemo_rl_mcore.algorithms.skip_guard import SkipGuard
from nemo_rl_mcore.config import CheckpointingConfig, RunConfig
from nemo_rl_mcore.data.tokenizer import CHAR_TOKENIZER_NAME, Tokenizer
from nemo_rl_mcore.errors import RunStoppedError, code_of, folder_error
from nemo_rl_mcore.interfaces import TrainedModel
from nemo_rl_mcore.preflight.folders import nearest_folder
from nemo_rl_mcore.preflight.saved_run import (
    RECIPE_FILE,
    TOKENIZER_FOLDER,
    cannot_resume,
    changes_since,
    read_recipe_of,
    recipe_text,
)
from nemo_rl_mcore.training.checkpoints import (
    INFO_FILE,
    Checkpoint,
    CheckpointStore,
    NotACheckpointError,
    Retention,
    read_checkpoint,
    require_checkpoint,
)

Notify = Callable[[str], None]
_OF_FOLDERS = {
    *(
        errno.ENOSPC,
        errno.EDQUOT,
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


@dataclass
class RunCheckpoints:
    """The checkpoints of a run; without a store the run starts at its first step and leaves none.

    recipe: what is saved as config.yaml. start: the checkpoint to go on from. resume: the key of that name.
    tokenizer: what is saved with each checkpoint; None for the one that is built in. extra_parts: what else is, by the
    name of its folder: called with the folder, which it makes.
    """

    store: CheckpointStore | None = None
    save_period: int = 1
    last_step: int = 0
    recipe: str = ""
    start: Checkpoint | None = None
    resume: str = "auto"
    tokenizer: Tokenizer | None = None
    extra_parts: dict[str, Callable[[Path], None]] = field(default_factory=dict[str, Callable[[Path], None]])
    _finished: FinishedStep | None = field(default=None, init=False)
    _saved: int | None = field(default=None, init=False)
    _tried: int | None = field(default=None, init=False)
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
        """Say whether there is a finished step whose save was not tried yet, and a place for it."""
        return self.store is not None and self._finished is not None and self._finished.step != self._tried

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
        return self.store is not None and (step % self.save_period == 0 or step == self.last_step)

    def begin_update(self) -> None:
        """Take note that the next step changes the weights from now on."""
        self.updating = True

    def finish(self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]) -> None:
        """Take note of a step whose update is done."""
        self._finished = FinishedStep(step, metrics, counters)
        self.updating = False

    def save_finished(self, models: Mapping[str, TrainedModel]) -> None:
        """Save the step that was finished last; see `save`."""
        assert self._finished is not None
        finished = self._finished
        with activity.at(f"saving step {finished.step}", timed=False):
            self.save(finished.step, models, finished.metrics, finished.counters)

    def save(
        self,
        step: int,
        models: Mapping[str, TrainedModel],
        metrics: Mapping[str, float],
        counters: Mapping[str, Any],
    ) -> None:
        """Write the checkpoint of a finished step. The data needs no position: prompts are drawn by (seed, step).

        Raises RunStoppedError, naming the folder and why, when it cannot be written to; nothing is then left of it.
        """
        assert self.store is not None
        self._tried = step
        folder: Path | None = None
        try:
            with self.store.writing(step, metrics, counters) as folder:
                (folder / RECIPE_FILE).write_text(self.recipe, encoding="utf-8")
                if self.tokenizer is not None:
                    self.tokenizer.save_as_hugging_face(folder / TOKENIZER_FOLDER)
                for name, write in self.extra_parts.items():
                    write(folder / name)
                for name, model in models.items():
                    (folder / name).mkdir()
                    model.save_checkpoint(str(folder / name))
        except (OSError, RunStoppedError) as error:
            reason = error_of_the_folder(error, self.store.root)
            if reason is None:
                raise
            failure = folder_error(
                "checkpointing.checkpoint_dir", self.store.root, reason, "make room, or name another"
            )
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise RunStoppedError(
                f"{failure}; the checkpoint of step {step} is not there", code="checkpoint-not-written"
            ) from error
        self._saved = step

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
            how = "" if self.resume == "auto" else " with checkpointing.resume=auto"
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


def open_checkpoints(config: RunConfig, notify: Notify, tokenizer: Tokenizer | None = None) -> RunCheckpoints:
    """Find where the run begins and prepare the folder for what it leaves; `notify` is called in whole lines.

    tokenizer: what a checkpoint is to hold if the recipe names a folder or a model of the hub.
    Raises RunStoppedError when the checkpoint to go on from, or to take weights from, is missing or of another model.
    """
    section = config.checkpointing
    for plan in config.models.values():
        if plan.policy.init_checkpoint is not None:
            require_whole(plan.policy.init_checkpoint, plan.key("policy.init_checkpoint"), section, notify)
    if not section.enabled:
        return RunCheckpoints()
    retention = Retention(section.keep_top_k, section.logged_metric, section.higher_is_better)
    store = CheckpointStore(Path(section.checkpoint_dir), retention, section.verify_checksums)
    start = _find_start(section, store, notify)
    built_in = config.policy.tokenizer.name == CHAR_TOKENIZER_NAME
    checkpoints = RunCheckpoints(
        store,
        section.save_period,
        config.loop.max_num_steps,
        recipe_text(config),
        start,
        section.resume,
        None if built_in else tokenizer,
    )
    if start is not None:
        _compare(start, config, notify)
    if checkpoints.nothing_left:
        if store.root.is_dir():
            for leftover in store.remove_unfinished():
                notify(f"removed: {leftover}, which was not finished")
        return checkpoints
    for folder in store.begin_after(start.step if start is not None else 0):
        notify(f"set aside: {folder} ({_why_aside(folder, section)})")
    return checkpoints


def _why_aside(folder: Path, section: CheckpointingConfig) -> str:
    try:
        found = read_checkpoint(folder, verify_checksums=section.verify_checksums)
    except NotACheckpointError as error:
        return str(error)
    if not SkipGuard.accepts(found.counters):
        return f"the counters in {folder / INFO_FILE} are none of a run"
    return f"checkpointing.resume={section.resume} begins before it"


def require_whole(folder: str, key: str, section: CheckpointingConfig, notify: Notify) -> Checkpoint:
    """Return the checkpoint that a key names; `notify` is called when it has no checksums. Raises RunStoppedError."""
    try:
        found = require_checkpoint(Path(folder), key, verify_checksums=section.verify_checksums)
    except NotACheckpointError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    _report_without_checksums(found, section, notify)
    return found


def _find_start(section: CheckpointingConfig, store: CheckpointStore, notify: Notify) -> Checkpoint | None:
    if section.resume == "never":
        return None
    if section.resume != "auto":
        found = require_whole(section.resume, "checkpointing.resume", section, notify)
        if not SkipGuard.accepts(found.counters):
            raise RunStoppedError(
                f"checkpointing.resume: the counters in {found.folder / INFO_FILE} are none of a run",
                code="broken-counters",
            )
        return found
    latest = next((one for one in store.newest_first() if SkipGuard.accepts(one.counters)), None)
    if latest is not None:
        _report_without_checksums(latest, section, notify)
    return latest


def _report_without_checksums(checkpoint: Checkpoint, section: CheckpointingConfig, notify: Notify) -> None:
    if section.verify_checksums and not checkpoint.has_checksums:
        notify(f"{checkpoint.folder} was saved without checksums: its files are not verified")


def _compare(start: Checkpoint, config: RunConfig, notify: Notify) -> None:
    """Refuse a checkpoint of another algorithm, or whose state has no place in the models; report what has changed."""
    try:
        saved = read_recipe_of(start.folder)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if reason := cannot_resume(saved, config):
        raise RunStoppedError(f"checkpointing.resume: {start.folder} {reason}", code="other-run")
    if start.step >= config.loop.max_num_steps:
        key = f"{config.algorithm}.max_num_steps"
        notify(f"already finished after step {start.step}, saved in {start.folder} ({key})")
        return
    changes = [str(change) for change in changes_since(saved, config)]
    notify(
        f"resuming after step {start.step} from {start.folder}"
        + (f", with changes: {', '.join(changes)}" if changes else "")
    )
