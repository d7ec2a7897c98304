"""The checksums of a policy's folder, taken and compared by all ranks together: each reads a part of the bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
from nemo_rl_mcore.rank.checksums import SUMS_FILE, read_sums, require_sums, sha256, write_sums

_log = logging.getLogger(__name__)
_WRITER = re.compile(r"(?:__|rank_)(\d+)[_.]")


def write_sums_together(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the list of a folder that all ranks have filled; each reads what it wrote, which its machine still holds.

    group: of all ranks; None is as in `agreement.together`. Raises OSError on all ranks when one of them cannot.
    """
    rank = dist.get_rank()
    own = agreed(
        lambda: {name: sha256(folder / name) for name in _files(folder) if _writer(name) == rank}, group
    )
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own, group)
    agreed_on_first(
        lambda: write_sums(folder, {name: value for part in of_all for name, value in part.items()}), group
    )


def require_sums_together(folder: Path, part: str = "", *, required: bool) -> None:
    """Compare the files of a folder, or those below a folder inside, with its list; each rank takes an equal share.

    Raises ValueError on all ranks, naming a file that was changed, is missing or was added. A folder without a list
    passes with a line in the log if none is required, as in those of older versions.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def compare() -> None:
        sums = read_sums(folder)
        if sums is None:
            if required:
                raise RefusedError(f"{folder / SUMS_FILE} is missing", code="missing-checksums")
            if rank == 0:
                _log.warning("%s has no %s: its files are loaded unchecked", folder, SUMS_FILE)
            return
        listed = {name for name in sums if name.startswith(part)}
        there = {name: (folder / name).lstat().st_size for name in _files(folder) if name.startswith(part)}
        if gone := sorted(listed - there.keys()):
            raise RefusedError(
                f"{folder / gone[0]} is missing: {folder / SUMS_FILE} lists it", code="missing-file"
            )
        largest_first = sorted(there, key=lambda name: (-there[name], name))
        require_sums(folder, sums, largest_first[rank::ranks])

    agreed(compare)


def _files(folder: Path) -> Iterator[str]:
    """Return what the list holds: every regular file but the list itself; readers refuse links and pipes."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / SUMS_FILE:
            yield str(path.relative_to(folder))


def _writer(name: str) -> int:
    """Return the rank that wrote a file."""
    match = _WRITER.match(Path(name).name)
    return int(match[1]) if match is not None else 0
