"""Leave behind what a run can go on from, as the section `checkpointing` asks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_mcore.config import CheckpointingConfig, RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import CHAR_TOKENIZER_NAME, Tokenizer
from nemo_rl_mcore.driver.checkpoints import (
    INFO_FILE,
    Checkpoint,
    CheckpointStore,
    NotACheckpointError,
    Retention,
    read_checkpoint,
    require_checkpoint,
)
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.run_folder import (
    RECIPE_FILE,
    TOKENIZER_FOLDER,
    cannot_resume,
    changes_since,
    nearest_folder,
    read_recipe_of,
    recipe_text,
)
from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.errors import ChangedRunError, RanksFailedError, RunStoppedError, code_of, folder_error
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

_NAMED_SAMPLES = 8
_LOGARITHMS_OF_NOTHING = ("teacher_tail_logmass",)
"""Columns in which -inf is a value: a teacher that names the whole vocabulary leaves no mass."""
NOT_WRITTEN = "checkpoint-not-written"
"""The code of a checkpoint whose folder cannot be written to."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_FOLDERS = {
    *(*_FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTDIR),
}
_FULL_BELOW = 1 << 20
# The line that ends a traceback, with the path if it has one.
_ERRNO = re.compile(r"^(?:[\w.]+: |rank \d+: )+\[Errno (\d+)\][^\n']*(?:'([^'\n]+)')?", re.MULTILINE)


class TooManySkippedStepsError(RunStoppedError):
    """More optimizer steps in a row were skipped than `max_consecutive_skips` allows."""


@dataclass
class SkipGuard:
    """Follows the optimizer steps of a run, which stops after `limit` in a row whose loss or gradient was not finite.

    total: all steps skipped so. empty: steps that had nothing to train on, which say nothing of the run's health.
    """

    limit: int
    total: int = 0
    empty: int = 0
    in_a_row: int = 0
    last_reason: str = ""

    @classmethod
    def accepts(cls, counters: Mapping[str, object]) -> bool:
        """Say whether the constructor takes these counters, which were read from a file."""
        kinds = {name: type(value) for name, value in cls(limit=1).counters().items()}
        return all(
            type(value) is kinds.get(name) and (not isinstance(value, int) or value >= 0)
            for name, value in counters.items()
        )

    def counters(self) -> dict[str, int | str]:
        counted = asdict(self)
        del counted["limit"]
        return counted

    def record(self, skip_reasons: Sequence[str | None]) -> None:
        for reason in skip_reasons:
            if reason == EMPTY_STEP:
                self.empty += 1
            elif reason is None:
                self.in_a_row = 0
            else:
                self.total += 1
                self.in_a_row += 1
                self.last_reason = reason

    def stop_if_too_many(self, step: int, batch: BatchedDataDict) -> None:
        """Raise TooManySkippedStepsError at the limit: it names the samples with a value that is not finite, or all."""
        if self.in_a_row < self.limit:
            return
        prompts, samples = batch["prompt_index"].tolist(), batch["sample_index"].tolist()
        broken: dict[int, list[str]] = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                sound = value.isfinite() | (value == -torch.inf if key in _LOGARITHMS_OF_NOTHING else False)
                for row in (~sound.reshape(len(value), -1).all(1)).nonzero().flatten():
                    broken.setdefault(int(row), []).append(key)
        named = [
            f"prompt {prompts[row]} sample {samples[row]} ({', '.join(keys)})" for row, keys in broken.items()
        ]
        more = f" and {len(named) - _NAMED_SAMPLES} more" if len(named) > _NAMED_SAMPLES else ""
        suspects = f"not finite in: {'; '.join(named[:_NAMED_SAMPLES])}{more}"
        if not broken:
            drawn = sorted(set(prompts))
            suspects = (
                f"the batch itself is finite, so the weights or the loss are at fault (policy.recompute_prev_logprobs: "
                f"always names rows whose log-probabilities are not finite); its prompts are "
                f"{drawn[:_NAMED_SAMPLES]}{' ...' if len(drawn) > _NAMED_SAMPLES else ''}"
            )
        raise TooManySkippedStepsError(
            f"step {step}: the optimizer step was skipped {self.in_a_row} times in a row "
            f"(max_consecutive_skips: {self.limit}); {self.last_reason}; {suspects}"
        )


@dataclass(frozen=True)
class FinishedStep:
    step: int
    metrics: Mapping[str, float]
    counters: Mapping[str, Any]


@dataclass
class StepCheckpoint:
    """A checkpoint that is being written; once it is there, the seconds that it took, in the background too."""

    finished: FinishedStep
    copying_s: float = 0.0
    writing_s: float = 0.0
    seconds: float = 0.0


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
    finished: FinishedStep | None = field(default=None, init=False)
    """The last one."""
    begun: StepCheckpoint | None = field(default=None, init=False)
    """The checkpoint that is not complete."""
    _saved: int | None = field(default=None, init=False)
    _tried: int | None = field(default=None, init=False)
    _overdue: bool = field(default=False, init=False)
    """Whether a checkpoint that was due is not there."""
    updating: bool = field(default=False, init=False)
    """Whether weights change, by a step that is not finished."""
    going_back: bool = field(default=False, init=False)
    """Whether the weights are, or may be, those of a step before the last finished one, which is trained again."""
    failure: str = field(default="", init=False)
    """Reason for which the last finished step is not saved."""

    @property
    def resumed_step(self) -> int | None:
        return self.start.step if self.start is not None else None

    @property
    def nothing_left(self) -> bool:
        return self.start is not None and self.start.step >= self.last_step

    @property
    def unsaved(self) -> bool:
        """Say whether there is a finished step with a place, whose save was not tried, or met a full disk."""
        return self.store is not None and self.finished is not None and self.finished.step != self._tried

    @property
    def saved_step(self) -> int | None:
        """Return the step of the checkpoint that `restore` goes back to: the run's last one, else where it began."""
        return self._saved if self._saved is not None else self.resumed_step

    def restore(self, models: Mapping[str, Policy]) -> Mapping[str, Any]:
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
        on_time = step % self.save_period == 0 or step == self.last_step
        return self.store is not None and (on_time or self._overdue)

    def finish(self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]) -> None:
        self.finished = FinishedStep(step, metrics, counters)
        self.updating = False

    def save_finished(self, models: Mapping[str, Policy]) -> None:
        """Begin the checkpoint of the last finished step, which `complete` completes; prompts go by (seed, step).

        Of the models `in_background` a copy is taken. Raises RunStoppedError, naming the folder and why, where it
        cannot be written to; nothing is then left of it.
        """
        assert self.store is not None
        assert self.finished is not None
        finished, began = self.finished, time.monotonic()
        self._tried, self._overdue = finished.step, False
        self.begun = begun = StepCheckpoint(finished)
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
            begun.copying_s = time.monotonic() - began

    def complete(self, models: Mapping[str, Policy], *, wait: bool) -> StepCheckpoint | None:
        """Make a checkpoint of what was begun, once it is written; wait: until then. None: nothing was, or not yet."""
        if (begun := self.begun) is None:
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
        self.begun, self._saved = None, step
        begun.seconds = begun.copying_s + begun.writing_s + time.monotonic() - committing
        return begun

    def settle(self, models: Mapping[str, Policy]) -> None:
        """Complete what was begun, or drop it where ranks that write it are lost: others are to take their place."""
        with suppress(RanksFailedError):
            self.complete(models, wait=True)

    @contextmanager
    def _whole_or_nothing(self, models: Mapping[str, Policy]) -> Generator[None]:
        """Leave nothing of the checkpoint when the block raises, and have it made up for; see `save_finished`."""
        assert self.store is not None
        assert self.begun is not None
        step = self.begun.finished.step
        try:
            yield
        except BaseException as error:
            # While the disk is as full as it was.
            of_folder = isinstance(error, (OSError, RunStoppedError))
            reason = error_of_the_folder(error, self.store.root) if of_folder else None
            for name in self.in_background & models.keys():  # no one is to write on, into the next one
                with suppress(RunStoppedError):
                    if models[name].serves() and not current_stop_signals().insisted:
                        models[name].checkpoint_written(wait=True)
            self.store.drop(step)
            self.begun, self._tried, self._overdue = None, None, True
            if reason is None:
                raise
            self._tried = None if reason.errno in _FULL else step
            failure = folder_error(
                "checkpointing.checkpoint_dir", self.store.root, reason, "make room, or name another"
            )
            raise RunStoppedError(f"{failure}; saving step {step} failed", code=NOT_WRITTEN) from error

    def standing(self) -> str:
        """Return what is kept of the weights, what is lost, and how the run goes on: for how it ended."""
        saved = self.saved_step
        parts: list[str] = []
        if self.finished is None:
            parts.append("no step was finished")
        elif (last := self.finished.step) != saved:
            first = (saved or 0) + 1
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            why = "checkpointing.enabled is false" if self.store is None else self.failure
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


Notify = Callable[[str], None]


def open_checkpoints(
    config: RunConfig,
    notify: Notify,
    tokenizer: Tokenizer | None = None,
    *,
    refuse_changes: bool = False,
    ended_by: Sequence[str] = (),
) -> RunCheckpoints:
    """Find where the run begins and prepare the folder for what it leaves; `notify` is called in whole lines.

    tokenizer: what a checkpoint is to hold if the recipe names a folder or a model of the hub. refuse_changes: raise
    ChangedRunError where `auto` would go on under another recipe, code or data, or has nothing left to do. ended_by:
    the paths of the keys that say which step is the last one.
    Raises RunStoppedError when the checkpoint to go on from, or to take weights from, is missing or of another model.
    """
    section = config.checkpointing
    for plan in config.models.values():
        if plan.policy.init_checkpoint is not None:
            require_whole(plan.policy.init_checkpoint, plan.key("policy.init_checkpoint"))
    if not section.enabled:
        return RunCheckpoints()
    retention = Retention(section.keep_top_k, section.logged_metric, section.higher_is_better)
    store = CheckpointStore(Path(section.checkpoint_dir), retention)
    start = _find_start(section, store)
    built_in = config.policy.tokenizer.name == CHAR_TOKENIZER_NAME
    checkpoints = RunCheckpoints(
        store,
        section.save_period,
        config.loop.max_num_steps,
        recipe_text(config),
        start,
        section.resume,
        None if built_in else tokenizer,
        in_background=frozenset(name for name, plan in config.models.items() if plan.saved_in_background),
    )
    if start is not None:
        notify(_standing(start, config, refuse_changes and section.resume == "auto", ended_by))
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
        found = read_checkpoint(folder)
    except NotACheckpointError as error:
        return str(error)
    if not SkipGuard.accepts(found.counters):
        return f"the counters in {folder / INFO_FILE} are none of a run"
    return f"checkpointing.resume={section.resume} begins before it"


def require_whole(folder: str, key: str) -> Checkpoint:
    try:
        return require_checkpoint(Path(folder), key)
    except NotACheckpointError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error


def _find_start(section: CheckpointingConfig, store: CheckpointStore) -> Checkpoint | None:
    if section.resume == "never":
        return None
    if section.resume not in ("auto", "must"):
        found = require_whole(section.resume, "checkpointing.resume")
        if not SkipGuard.accepts(found.counters):
            raise RunStoppedError(
                f"checkpointing.resume: the counters in {found.folder / INFO_FILE} are none of a run",
                code="broken-counters",
            )
        return found
    latest = next((one for one in store.newest_first() if SkipGuard.accepts(one.counters)), None)
    if latest is None and section.resume == "must":
        raise RunStoppedError(
            f"checkpointing.resume: must, and {store.root} holds no checkpoint to go on from; set it to auto, or name "
            "the folder of the run",
            code="nothing-to-resume",
        )
    return latest


def _standing(start: Checkpoint, config: RunConfig, refuse_changes: bool, ended_by: Sequence[str]) -> str:
    """Say where the run begins, or that nothing is left of it, and what has changed; refuse what cannot go on."""
    try:
        saved = read_recipe_of(start.folder)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if reason := cannot_resume(saved, config):
        raise RunStoppedError(f"checkpointing.resume: {start.folder} {reason}", code="other-run")
    changes = changes_since(saved, config)
    # What says how long a run goes on changes nothing of the steps that are behind it.
    bounds = [f"{config.algorithm}.{key}" for key in ("max_num_steps", "max_num_epochs")]
    of_the_result = [change for change in changes if change.path not in bounds]
    if refuse_changes and of_the_result:
        told = ", ".join(map(str, of_the_result))
        error = ChangedRunError(
            f"{start.folder} was saved before these changes: {told}; to go on with them, set checkpointing.resume (the "
            "argument resume) to must; to begin anew, set it to never, which puts aside what is there, or name another "
            "folder (out)",
            code="changed-run",
        )
        error.keys = tuple(change.path for change in of_the_result)
        raise error
    if start.step < config.loop.max_num_steps:
        line, how = f"resuming after step {start.step} from {start.folder}", "with changes"
    else:
        keys = " and ".join(ended_by or (f"{config.algorithm}.max_num_steps",))
        line = f"already finished after step {start.step}, saved in {start.folder} ({keys})"
        changes, how = of_the_result, "without these changes"
    return line + (f", {how}: {', '.join(map(str, changes))}" if changes else "")
