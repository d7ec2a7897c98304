"""A run's checkpoint folder. Checkpoints are written aside, renamed when complete, and recognised by their content.

  checkpoint_dir/step_N/training_info.json   the step, its metrics, the run's counters, every file with its size
                        config.yaml          the resolved recipe
                        tokenizer/           the tokenizer, unless it is the built-in one
                        policy/              the policy's files, with their own checksums
                        rollouts/            an asynchronous run's ledger and ready groups
                        SHA256SUMS           every other file's checksum
  checkpoint_dir/tmp_*                       being written or deleted; the next run removes it
  checkpoint_dir/aside_step_N                set aside: broken, or after the step that a run was resumed from

A process may be killed at any moment, so `step_N` appears and disappears by a single rename.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.errors import RefusedError, code_of, shortened
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.checkpoints import SUMS_FILE, read_sums, require_sums, sha256, write_sums

INFO_FILE = "training_info.json"
ROLLOUTS_FOLDER = "rollouts"

_STEP_NAME = re.compile(r"step_(\d+)")
_TEMPORARY_NAME = re.compile(r"tmp_(deleted_)?step_\d+")


class NotACheckpointError(RefusedError):
    """A folder holds no checkpoint or an incomplete one; the message names the file."""


class _Info(BaseModel):
    """The content of `training_info.json`. files: sizes by name. checksums: the name of the checksum file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: Annotated[int, Field(ge=0)]
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)] | None]
    counters: dict[str, int | float | str | None]
    files: dict[str, Annotated[int, Field(ge=0)]]
    checksums: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. metrics: the step's metrics. counters: the run's counters, such as skipped steps."""

    folder: Path
    step: int
    metrics: Mapping[str, float | None]
    counters: Mapping[str, Any]


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the newest and the `keep` best (None: all) or, without a metric, the last ones.

    metric: a name in the step's metrics; checkpoints without a finite value rank last.
    """

    keep: int | None = None
    metric: str | None = None
    higher_is_better: bool = True

    def superfluous(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        if self.keep is None or not checkpoints:
            return []

        ranks: dict[int, float] = {}  # by step
        for one in checkpoints:
            value = 0.0 if self.metric is None else one.metrics.get(self.metric)
            if value is None or not math.isfinite(value):
                ranks[one.step] = -math.inf
            else:
                ranks[one.step] = value if self.higher_is_better else -value
        best = sorted(ranks, key=lambda step: (ranks[step], step), reverse=True)
        kept = {max(ranks), *best[: self.keep]}
        return [one for one in checkpoints if one.step not in kept]


@dataclass(frozen=True)
class CheckpointStore:
    root: Path
    retention: Retention = Retention()

    def checkpoints(self) -> list[Checkpoint]:
        """Return all complete checkpoints, oldest first; skip folders with a missing or truncated file."""
        found: list[Checkpoint] = []
        for step, folder in _step_folders(self.root):
            with suppress(NotACheckpointError):
                one = read_checkpoint(folder, verify_checksums=False)
                if one.step == step:
                    found.append(one)
        return sorted(found, key=lambda one: one.step)

    def newest_first(self) -> Iterator[Checkpoint]:
        for one in reversed(self.checkpoints()):
            with suppress(NotACheckpointError):
                yield read_checkpoint(one.folder)

    def begin_after(self, step: int) -> list[Path]:
        """Prepare the folder for the step after `step`, and return the folders set aside.

        Earlier runs' unfinished folders are removed. Later checkpoints, which are broken or belong to an abandoned
        continuation, are renamed, so that none is mistaken for the latest.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        aside: list[Path] = []
        for number, folder in _step_folders(self.root):
            if number > step:
                aside.append(free_name(self.root / f"aside_{folder.name}"))
                folder.rename(aside[-1])
        _sync(self.root)
        return aside

    def remove_unfinished(self) -> list[Path]:
        """Remove and return the folders that an earlier run was writing or deleting when it ended."""
        found = [path for path in self.root.iterdir() if _TEMPORARY_NAME.fullmatch(path.name)]
        for leftover in found:
            _remove(leftover)
        return found

    def begin(self, step: int) -> Path:
        self.drop(step)  # left by an earlier attempt, in which ranks died
        folder = self.root / f"tmp_step_{step}"
        folder.mkdir(parents=True)
        return folder

    def drop(self, step: int) -> None:
        shutil.rmtree(self.root / f"tmp_step_{step}", ignore_errors=True)

    def commit(self, step: int, metrics: Mapping[str, float], counters: Mapping[str, Any]) -> None:
        """Commit the folder returned by `begin` to disk as `step_N`, then delete superfluous checkpoints.

        If it raises or the process dies, earlier checkpoints are unchanged. metrics, counters: see `Checkpoint`.
        """
        folder = self.root / f"tmp_step_{step}"
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): path.stat().st_size for path in written}
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        info = _Info(
            step=step, metrics=finite, counters=dict(counters), files=files, checksums=SUMS_FILE
        ).model_dump()
        (folder / INFO_FILE).write_text(json.dumps(info, indent=1, allow_nan=False), encoding="utf-8")
        write_sums(folder, {name: sha256(folder / name) for name in _outside_of_lists((INFO_FILE, *files))})
        innermost_first = sorted((folder, *folder.rglob("*")), key=lambda path: len(path.parts), reverse=True)
        for path in innermost_first:
            activity.advance(f"bringing {path} to disk")
            _sync(path)
        folder.rename(self.root / f"step_{step}")
        _sync(self.root)
        for checkpoint in self.retention.superfluous(self.checkpoints()):
            # Rename first: a half-deleted folder would be a broken checkpoint.
            doomed = self.root / f"tmp_deleted_{checkpoint.folder.name}"
            checkpoint.folder.rename(doomed)
            _remove(doomed)


def read_checkpoint(folder: Path, *, verify_checksums: bool = True) -> Checkpoint:
    """Return the checkpoint in a folder; raise NotACheckpointError, naming the file, if it is incomplete.

    verify_checksums: True to verify the checkpoint's own files; the models' files are verified on loading.
    """
    path = folder / INFO_FILE
    try:
        info = _Info.model_validate(read_json(path, follow_links=False))
    except OSError as error:
        raise NotACheckpointError(
            f"{path} cannot be read: {error.strerror}", code="unreadable-file"
        ) from error
    except ValueError as error:
        raise NotACheckpointError(
            f"{path} is broken: {shortened(' '.join(str(error).split()), 200)}", code="broken-file"
        ) from error
    if verify_checksums:
        _require_sums(folder, [INFO_FILE])  # first, since it lists the other files
    home = folder.resolve()
    for name, size in info.files.items():
        path = folder / name
        try:
            inside = path.resolve() == home / name  # neither outside the folder nor a link
            status = path.lstat()
        except (OSError, ValueError) as error:
            raise NotACheckpointError(
                f"{shortened(str(path), 200)} is not there: {shortened(str(error))}", code="missing-file"
            ) from error
        if not inside or not stat.S_ISREG(status.st_mode):
            raise NotACheckpointError(f"{path} is not a file of this folder", code="not-a-regular-file")
        if status.st_size != size:
            raise NotACheckpointError(
                f"{path} has {status.st_size} bytes, and {size} were written", code="file-size"
            )
    if verify_checksums:
        _require_sums(folder, _outside_of_lists(info.files))
    return Checkpoint(folder, info.step, info.metrics, info.counters)


def _require_sums(folder: Path, names: Iterable[str]) -> None:
    try:
        sums = read_sums(folder)
        if sums is None:
            raise RefusedError(f"{folder / SUMS_FILE} does not exist", code="missing-checksums")
        require_sums(folder, sums, names)
    except ValueError as error:
        raise NotACheckpointError(str(error), code=code_of(error)) from error


def require_checkpoint(folder: Path, key: str, *, verify_checksums: bool = True) -> Checkpoint:
    """Return the checkpoint in a key's folder, or raise NotACheckpointError, naming key and folder."""
    try:
        return read_checkpoint(folder, verify_checksums=verify_checksums)
    except NotACheckpointError as error:
        inside = [one.folder.name for one in CheckpointStore(folder).checkpoints()]
        remedy = (
            f"it holds {', '.join(inside)}: name one of them" if inside else "name a folder step_N of a run"
        )
        what = f"{key}: {str(folder)!r} is not a complete checkpoint ({error}); {remedy}"
        raise NotACheckpointError(what, code=code_of(error)) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    named = ((_STEP_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return [(int(match[1]), path) for match, path in named if match is not None]


def free_name(wanted: Path) -> Path:
    """Return the name itself, or the name with the first free number appended."""
    number, name = 1, wanted
    while os.path.lexists(name):
        name, number = wanted.with_name(f"{wanted.name}.{number}"), number + 1
    return name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _outside_of_lists(names: Iterable[str]) -> list[str]:
    """Return the paths inside a folder that no checksum file of a subfolder lists."""
    names = [*names]
    listed = tuple(name.removesuffix(SUMS_FILE) for name in names if name.endswith(f"/{SUMS_FILE}"))
    return [name for name in names if not name.startswith(listed) or name.endswith(f"/{SUMS_FILE}")]
