"""The folders of a run: made, tried and locked before its ranks start.

One run writes into a folder at a time. The lock is the kernel's: it is free when the process is gone, whatever ended
it, and whoever only reads takes no notice of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.driver.folders import folders_of, too_full, try_to_write
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.own_files import next_free, open_own, replacing
from nemo_rl_mcore.driver.saved_run import RECIPE_FILE, recipe_text
from nemo_rl_mcore.errors import RunStoppedError, folder_error

LOCK_FILE = ".lock"
_held: set[tuple[int, int]] = set()
"""Device and inode of the folders that this process has locked."""


@contextmanager
def run_folders(config: RunConfig) -> Generator[None]:
    """Make the folders of a run and hold them for the block; nothing else is written or set aside before.

    Raises RunStoppedError, naming key and folder, where another run holds one, where one cannot be written to, and
    where a checkpoint would not fit.
    """
    with held_folders(folders_of(config)):
        if problem := too_full(config):
            raise RunStoppedError(str(problem))
        yield


def leave_recipe(config: RunConfig) -> None:
    """Write the resolved recipe into the folder of the run; another one that is there is put aside by number.

    Raises FolderError.
    """
    folder = Path(config.logger.log_dir)
    path = folder / RECIPE_FILE
    text = recipe_text(config).encode()
    try:
        if path.is_file() and path.read_bytes() != text:
            path.rename(next_free(path))
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise folder_error("logger.log_dir", folder, error) from error


@contextmanager
def held_folders(folders: Mapping[str, Path]) -> Generator[None]:
    """Make folders, by the keys that name them, and hold them for the block.

    Raises RunStoppedError, naming key and folder, where another process holds one, and where one cannot be written to.
    """
    with ExitStack() as held:
        for key, folder in folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(_locked(key, folder))
                try_to_write(folder)
            except OSError as error:
                raise RunStoppedError(str(folder_error(key, folder, error, "name another folder"))) from error
        yield


def _opened_lock(path: Path) -> TextIO:
    """Open the file of the lock, made if need be; raises OSError for a link, a pipe, and another name of a file."""
    descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no file of its folder alone", str(path))
    return open(descriptor, "a+", encoding="utf-8")


@contextmanager
def _locked(key: str, folder: Path) -> Generator[None]:
    found = folder.stat()
    identity = found.st_dev, found.st_ino
    if identity in _held:  # one folder under two keys, or of two recipes of a run
        yield
        return
    # No child inherits the descriptor, so that none keeps the lock when this process is gone.
    with _opened_lock(folder / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunStoppedError(
                f"{key}: {folder} is in use by another run ({file.read().strip() or 'which is just starting'}); wait "
                "for it to end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            write_line(
                sys.stderr, f"{key}: {folder} cannot be locked ({error.strerror}): start no second run in it"
            )
        file.truncate(0)
        file.write(
            f"host {socket.gethostname()}, pid {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        file.flush()
        _held.add(identity)
        try:
            yield
        finally:
            _held.discard(identity)
