"""Handle a run's checkpoints: find the one to resume from, and save steps as the section `checkpointing` specifies."""

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
from nemo_rl_mcore.config.cluster import METRIC_SOURCES
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import CHAR_TOKENIZER_NAME, Tokenizer
from nemo_rl_mcore.driver import activity
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
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

_NAMED_SAMPLES = 8
_LOGARITHMS_OF_NOTHING = ("teacher_tail_logmass", "prev_logprobs")
"""Columns in which -inf is valid: a teacher's top k may leave no mass, and filters may exclude a sampled token."""
NOT_WRITTEN = "checkpoint-not-written"
"""Error code for a checkpoint folder that cannot be written to."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_FOLDERS = {
    *(*_FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTDIR),
}
_FULL_BELOW = 1 << 20
# Matches an OSError in the last line of a traceback, including its path if there is one.
_ERRNO = re.compile(r"^(?:[\w.]+: |rank \d+: )+\[Errno (\d+)\][^\n']*(?:'([^'\n]+)')?", re.MULTILINE)


class TooManySkippedStepsError(RunStoppedError):
    """More optimizer steps in a row were skipped than `max_consecutive_skips` allows."""


@dataclass
class SkipGuard:
    """Counts skipped optimizer steps, to stop a run after `limit` consecutive steps with a non-finite loss or gradient.

    total: all skipped steps except empty ones. empty: steps without tokens to train on, which are harmless.
    """

    limit: int
    total: int = 0
    empty: int = 0
    in_a_row: int = 0
    last_reason: str = ""

    @classmethod
    def accepts(cls, counters: Mapping[str, object]) -> bool:
        """Return True if counters that were read from a file have the constructor's names, types and ranges."""
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
        """Raise TooManySkippedStepsError at the limit, naming samples with non-finite values or, if none, prompts."""
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


@dataclass
class StepCheckpoint:
    """A finished step and, once it is saved, its checkpoint's duration in seconds, including background writing."""

    step: int
    metrics: Mapping[str, float]
    counters: Mapping[str, Any]
    writing_s: float = 0.0
    seconds: float = 0.0


@dataclass
class RunCheckpoints:
    """A run's checkpoints; without a store, the run starts at its first step and saves nothing.

    recipe: text of config.yaml. start: the checkpoint to resume from, replaced by each new one. resume: the recipe's
    key `checkpointing.resume`. tokenizer: saved with each checkpoint; None for the built-in tokenizer. extra_parts:
    writers of further parts, by folder name; each creates its folder. in_background: models saved in the background.
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
    finished: StepCheckpoint | None = field(default=None, init=False)
    """The last finished step."""
    begun: StepCheckpoint | None = field(default=None, init=False)
    """The step whose checkpoint is being written."""
    _tried: int | None = field(default=None, init=False)
    _overdue: bool = field(default=False, init=False)
    """True if a checkpoint was due but its save failed."""
    updating: bool = field(default=False, init=False)
    """True while an unfinished step may have changed weights."""
    going_back: bool = field(default=False, init=False)
    """True while the weights may be older than the last finished step, because steps are being trained again."""
    failure: str = field(default="", init=False)
    """The reason why the last finished step is not saved."""

    @property
    def resumed_step(self) -> int | None:
        return self.start.step if self.start is not None else None

    @property
    def nothing_left(self) -> bool:
        return self.start is not None and self.start.step >= self.last_step

    @property
    def unsaved(self) -> bool:
        """True if there is a store and the last finished step still needs a save, for example after a full disk."""
        return self.store is not None and self.finished is not None and self.finished.step != self._tried

    def restore(self, models: Mapping[str, Policy]) -> Mapping[str, Any]:
        """Load the last checkpoint into the models; return its counters."""
        if self.start is None:
            return {}
        for name, model in models.items():
            model.load_checkpoint(str((self.start.folder / name).absolute()))
        return self.start.counters

    def due(self, step: int) -> bool:
        on_time = step % self.save_period == 0 or step == self.last_step
        return self.store is not None and (on_time or self._overdue)

    def finish(self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]) -> None:
        self.finished = StepCheckpoint(step, metrics, counters)
        self.updating = False

    def save_finished(self, models: Mapping[str, Policy]) -> None:
        """Begin the last finished step's checkpoint, which `complete` finishes.

        Models `in_background` are copied and written later. If the folder cannot be written to, removes the checkpoint
        and raises RunStoppedError, naming the folder and the reason.
        """
        assert self.store is not None
        assert self.finished is not None
        begun, began = self.finished, time.monotonic()
        self._tried, self._overdue, self.begun, begun.writing_s = begun.step, False, begun, 0.0
        with activity.at(f"saving step {begun.step}", timed=False), self._whole_or_nothing(models):
            folder = self.store.begin(begun.step)
            (folder / RECIPE_FILE).write_text(self.recipe, encoding="utf-8")
            if self.tokenizer is not None:
                self.tokenizer.save_as_hugging_face(folder / TOKENIZER_FOLDER)
            for name, write in self.extra_parts.items():
                write(folder / name)
            for name, model in models.items():
                (folder / name).mkdir()
                model.save_checkpoint(str(folder / name), wait=name not in self.in_background)
            begun.seconds = time.monotonic() - began

    def complete(self, models: Mapping[str, Policy], *, wait: bool) -> StepCheckpoint | None:
        """Complete and return the begun checkpoint; without `wait`, return None while it is still being written."""
        if (begun := self.begun) is None:
            return None
        assert self.store is not None
        with activity.at(f"saving step {begun.step}", timed=False), self._whole_or_nothing(models):
            for name in self.in_background:
                written_s = models[name].checkpoint_written(wait=wait)
                if written_s is None:
                    return None
                begun.writing_s = max(begun.writing_s, written_s)
            committing = time.monotonic()
            self.store.commit(begun.step, begun.metrics, begun.counters)
        folder = self.store.root / f"step_{begun.step}"
        self.begun, self.start = None, Checkpoint(folder, begun.step, begun.metrics, begun.counters)
        begun.seconds += begun.writing_s + time.monotonic() - committing
        return begun

    def settle(self, models: Mapping[str, Policy]) -> None:
        """Complete the checkpoint that was begun, or drop it if ranks that write it are lost."""
        with suppress(RanksFailedError):
            self.complete(models, wait=True)

    @contextmanager
    def _whole_or_nothing(self, models: Mapping[str, Policy]) -> Generator[None]:
        """Remove the checkpoint and mark it as overdue if the block raises; raise as `save_finished` does."""
        assert self.store is not None
        assert self.begun is not None
        step = self.begun.step
        try:
            yield
        except BaseException as error:
            # Find the reason before anything is removed, while the disk is still as full as it was.
            of_folder = isinstance(error, (OSError, RunStoppedError))
            reason = error_of_the_folder(error, self.store.root) if of_folder else None
            for name in self.in_background & models.keys():  # end writes before the next checkpoint
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
        """Describe, at the end of a run, which weights are saved, which are lost, and how to resume the run."""
        saved = self.resumed_step
        parts: list[str] = []
        if self.finished is None:
            parts.append("no step was finished")
        elif (last := self.finished.step) != saved:
            first = (saved or 0) + 1
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            why = "checkpointing.enabled is false" if self.store is None else self.failure
            parts.append(f"the weights of {steps} are lost" + (f" ({why})" if why else ""))
        if self.store is not None and self.start is not None:
            how = "" if self.resume in ("auto", "must") else " with checkpointing.resume=auto"
            parts.append(
                f"step {saved} is saved in {self.start.folder}, and the same command{how} goes on from there"
            )
        return "; ".join(parts)


def error_of_the_folder(error: BaseException, folder: Path) -> OSError | None:
    """Return the OSError behind an error, such as a full disk or a missing folder, even if a rank raised it.

    Returns None if a rank died or did not return, because it raised nothing.
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
        numbers.append(errno.ENOSPC)  # torch's writer reports it as "unexpected pos"
    return next((OSError(number, os.strerror(number)) for number in numbers if number in _OF_FOLDERS), None)


def open_checkpoints(
    config: RunConfig,
    notify: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
    *,
    refuse_changes: bool = False,
    ended_by: Sequence[str] = (),
) -> RunCheckpoints:
    """Find where the run begins and prepare its checkpoint folder; `notify` receives whole lines.

    tokenizer: saved unless it is built in. refuse_changes: True to raise ChangedRunError if `auto` finds that the
    recipe, code or data has changed since the checkpoint. ended_by: paths of the keys that set the last step. Raises
    RunStoppedError if a checkpoint to resume from or to take initial weights from is missing or cannot be used.
    """
    section = config.checkpointing
    for plan in config.models.values():
        if plan.policy.init_checkpoint is not None:
            require_whole(plan.policy.init_checkpoint, plan.key("policy.init_checkpoint"))
    if not section.enabled:
        return RunCheckpoints()
    source, _, metric = (section.metric_name or "").partition(":")
    ranks_by = f"{METRIC_SOURCES.get(source, source)}/{metric}" if metric else None
    retention = Retention(section.keep_top_k, ranks_by, section.higher_is_better)
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
        in_background=frozenset(
            name
            for name, plan in config.models.items()
            if plan.trained and plan.policy.megatron_cfg.checkpoint.async_save
        ),
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
    """Describe where the run resumes, or that it is finished, and its changes; raise if the run cannot resume."""
    try:
        saved = read_recipe_of(start.folder)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if reason := cannot_resume(saved, config):
        raise RunStoppedError(f"checkpointing.resume: {start.folder} {reason}", code="other-run")
    changes = changes_since(saved, config)
    # A run's length does not affect steps that are already done.
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
