"""Files that a run writes into its folders: whole or not there, and never something else under their name.

A folder may be one that somebody else has made first, as in /tmp: what is a link there is not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends; where it raises, the old one stays.

    A link at `path` is replaced itself. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_own(path: Path, flags: int) -> int:
    """Open a file that this run goes on with, or make it; its descriptor. Raises OSError for a link or a pipe."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor


def open_to_append(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a file for appending; raises OSError for a link or a pipe."""
    return cast("BinaryIO", open(open_own(path, os.O_RDWR | os.O_APPEND), "ab", buffering=buffering))


def next_free(path: Path) -> Path:
    """Return the name under which what an earlier run left is put aside: `metrics.1.jsonl`, or a later number."""
    number = 1
    while os.path.lexists(renamed := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return renamed
