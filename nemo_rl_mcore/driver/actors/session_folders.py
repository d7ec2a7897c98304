"""The folders of local sessions: private, held by the process that made them, and removed when it has left them."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nemo_rl_mcore.driver.actors import reaper

_PREFIX = "nemo_rl_mcore_"
_HELD = "held"
_KEPT_S = 7 * 24 * 3600.0


class SessionFolder:
    """A folder for this user alone, held until `release` or the end of this process.

    What runs that were killed, or failed and kept Ray's logs, have left in `parent` a week ago is removed.
    """

    def __init__(self, parent: Path) -> None:
        remove_left_behind(parent, older_than_s=_KEPT_S)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).resolve()  # as /proc shows it
        self._descriptor = os.open(self.path / _HELD, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Hold it no longer; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def remove_left_behind(parent: Path, *, older_than_s: float) -> None:
    """Remove this user's folders of sessions that no process holds or writes into, and that are older than this."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            state = folder.lstat()
            mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
            if mine and time.time() - state.st_mtime > older_than_s and not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _in_use(folder: Path) -> bool:
    if reaper.writers(str(folder.resolve())):
        return True
    # A driver that this machine's /proc does not show, such as one of another container, still holds its lock.
    try:
        descriptor = os.open(folder / _HELD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
