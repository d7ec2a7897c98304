"""The folders that a run writes into: whether they can be made, written to, and hold a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models.memory import checkpoint_bytes, copied_bytes

_PROBE = b"\0" * 4096


def folders_of(config: RunConfig) -> dict[str, Path]:
    """Return the folders that a run writes into, by their keys."""
    folders = {"logger.log_dir": Path(config.logger.log_dir)}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = Path(config.checkpointing.checkpoint_dir)
    return folders


def folder_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what stops a run from writing there, and leave nothing behind."""
    whole = True
    for key, folder in folders_of(config).items():
        nearest = nearest_folder(folder)
        try:
            if folder != nearest and nearest.is_dir():
                tempfile.TemporaryDirectory(dir=nearest).cleanup()
            try_to_write(nearest)
        except OSError as error:
            whole = False
            what = f"{str(folder)!r} cannot be written to: {str(nearest)!r}: {error.strerror}"
            yield Problem("not-writable", key, what, "name another folder")
    if whole and (problem := too_full(config)):
        yield problem


def try_to_write(folder: Path) -> None:
    """Write a file into a folder that is there, which has no name and is gone at once; raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(_PROBE)


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the innermost one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def too_full(config: RunConfig) -> Problem | None:
    """Return what is wrong where the disk has no room for one checkpoint."""
    if not config.checkpointing.enabled:
        return None
    folder = Path(config.checkpointing.checkpoint_dir)
    needed, free = checkpoint_bytes(config), shutil.disk_usage(nearest_folder(folder)).free
    if needed <= free:
        return None
    return Problem(
        "disk-full",
        "checkpointing.checkpoint_dir",
        f"{str(folder)!r} has {_gigabytes(free)} free, and a checkpoint takes about {_gigabytes(needed)}",
        "make room, or name another folder",
    )


def checkpoints_on_disk(config: RunConfig) -> str:
    """Say how many checkpoints the run keeps at most, and what they take."""
    section = config.checkpointing
    if not section.enabled:
        return "none (checkpointing.enabled: false)"
    kept = -(-config.loop.max_num_steps // section.save_period)
    if section.keep_top_k is not None:
        # The newest one is kept in addition to the best.
        kept = min(kept, section.keep_top_k + (section.metric_name is not None))
    size, copied = _gigabytes(kept * checkpoint_bytes(config)), copied_bytes(config)
    where = (
        f"every {section.save_period} steps, {kept} kept at most, about {size} in {section.checkpoint_dir}"
    )
    if copied:
        where += f", written from a copy of about {_gigabytes(copied)} in the machines' memory (async_save)"
    return where


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB"
