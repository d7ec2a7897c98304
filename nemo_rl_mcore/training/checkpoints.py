"""The folder of a run's checkpoints: written aside, renamed when whole, found again by what they hold.

  checkpoint_dir/step_N/training_info.json   the step, its metrics, the run's counters, every file with its size
                        config.yaml          the recipe, resolved
                        policy/              what the policy's workers wrote
  checkpoint_dir/tmp_*                       being written or deleted; the next run removes it
  checkpoint_dir/aside_step_N                set aside: broken, or behind the step that a run was resumed from

A process may be killed at any moment: `step_N` appears and goes by one rename, so the others stay whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

INFO_FILE = "training_info.json"
POLICY_FOLDER = "policy"

_STEP_NAME = re.compile(r"step_(\d+)")
_TEMPORARY_NAME = re.compile(r"tmp_(deleted_)?step_\d+")


class NotACheckpointError(ValueError):
    """A folder that was named as a checkpoint holds none, or one that is not whole."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. metrics: those of its step; counters: what the algorithm asked to keep."""

    folder: Path
    step: int
    metrics: Mapping[str, float | None]
    counters: Mapping[str, Any]

    @property
    def policy_folder(self) -> Path:
        """What the policy's workers wrote."""
        return self.folder / POLICY_FOLDER


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest, and `keep` in all (None: every one), the best or, without a metric, the last.

    metric: its name in the step's metrics; a checkpoint without it, or whose value is not finite, ranks last.
    """

    keep: int | None = None
    metric: str | None = None
    higher_is_better: bool = True

    def best_first(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints by rank; of equal ones the newer is better."""
        return sorted(checkpoints, key=lambda one: (self._score(one), one.step), reverse=True)

    def superfluous(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Those to delete."""
        if self.keep is None or not checkpoints:
            return []
        newest = max(checkpoints, key=lambda one: one.step)
        kept = self.best_first(checkpoints)[: self.keep]
        return [one for one in checkpoints if one not in kept and one is not newest]

    def _score(self, checkpoint: Checkpoint) -> float:
        if self.metric is None:
            return 0.0
        value = checkpoint.metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.higher_is_better else -value


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, under one folder."""

    root: Path
    retention: Retention = Retention()

    def checkpoints(self) -> list[Checkpoint]:
        """The whole ones, the oldest first; a folder that lacks a file, or holds a shorter one, is none."""
        found = [(folder, read_checkpoint(folder)) for folder in _step_folders(self.root)]
        whole = [one for folder, one in found if one is not None and one.step == _step_of(folder)]
        return sorted(whole, key=lambda one: one.step)

    def latest(self) -> Checkpoint | None:
        """The one with the highest step."""
        return max(self.checkpoints(), key=lambda one: one.step, default=None)

    def begin_after(self, step: int) -> list[Path]:
        """Make the folder one in which the step after `step` comes next; return what was set aside.

        What earlier runs left unfinished is removed. Checkpoints of later steps belong to a run that went on another
        way, or are broken: they are renamed, so that none of them is ever taken for the latest.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.iterdir():
            if _TEMPORARY_NAME.fullmatch(leftover.name):
                shutil.rmtree(leftover)
        aside: list[Path] = []
        for folder in _step_folders(self.root):
            if _step_of(folder) > step:
                aside.append(_free_name(self.root / f"aside_{folder.name}"))
                folder.rename(aside[-1])
        _sync(self.root)
        return aside

    @contextmanager
    def writing(
        self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]
    ) -> Generator[Path]:
        """Give a folder to fill; when the block ends it is on disk as `step_N`, and superfluous ones are deleted.

        If the block raises, or the process dies, the checkpoints before this one stay as they were.
        """
        folder = self.root / f"tmp_step_{step}"
        folder.mkdir(parents=True)
        yield folder
        files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        info = {"step": step, "metrics": finite, "counters": dict(counters), "files": files}
        (folder / INFO_FILE).write_text(json.dumps(info, indent=1, allow_nan=False), encoding="utf-8")
        for path in (*_files(folder), *_folders(folder)):
            _sync(path)
        folder.rename(self.root / f"step_{step}")
        _sync(self.root)
        self._delete_superfluous()

    def _delete_superfluous(self) -> None:
        for checkpoint in self.retention.superfluous(self.checkpoints()):
            # The rename takes it away as a whole; half deleted it would be a broken checkpoint.
            doomed = self.root / f"tmp_deleted_{checkpoint.folder.name}"
            checkpoint.folder.rename(doomed)
            shutil.rmtree(doomed)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None when it is not whole."""
    try:
        info = cast("dict[str, Any]", json.loads((folder / INFO_FILE).read_text(encoding="utf-8")))
        whole = all((folder / name).stat().st_size == size for name, size in info["files"].items())
        return Checkpoint(folder, info["step"], info["metrics"], info["counters"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def require_checkpoint(folder: Path, key: str) -> Checkpoint:
    """The checkpoint in the folder that a key names; raises NotACheckpointError, naming both, when there is none."""
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None:
        return checkpoint
    inside = [one.folder.name for one in CheckpointStore(folder).checkpoints()]
    remedy = f"it holds {', '.join(inside)}: name one of them" if inside else "name a folder step_N of a run"
    raise NotACheckpointError(f"{key}: {str(folder)!r} is no whole checkpoint; {remedy}")


def _step_folders(root: Path) -> list[Path]:
    """All `step_N`, whole or not."""
    return [path for path in root.iterdir() if _STEP_NAME.fullmatch(path.name)] if root.is_dir() else []


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _free_name(wanted: Path) -> Path:
    number, name = 1, wanted
    while name.exists():
        name, number = wanted.with_name(f"{wanted.name}.{number}"), number + 1
    return name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    """The folder and those inside it, the innermost first."""
    inner = [path for path in folder.rglob("*") if path.is_dir()]
    return sorted((folder, *inner), key=lambda path: len(path.parts), reverse=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
