"""Checksums of checkpoint files, and a thread that writes the files in the background."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from nemo_rl_mcore.data.strict_json import read_regular
from nemo_rl_mcore.errors import RefusedError, quoted
from nemo_rl_mcore.rank import activity

SUMS_FILE = "SHA256SUMS"
POLICY_FOLDER = "policy"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\x00]+)")
_CHUNK = 2**24
_LOOK_EVERY_S = 0.1


def sha256(path: Path) -> str:
    """Return the hexadecimal hash of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            activity.advance(f"taking the checksum of {path}")
            hashed.update(chunk)
    return hashed.hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write a folder's checksum file; sums: hash by path relative to the folder."""
    lines = (f"{sums[name]}  {name}\n" for name in sorted(sums))
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str] | None:
    """Return hash by relative path from a folder's checksum file, None without one; ValueError if it is broken."""
    path = folder / SUMS_FILE
    try:
        lines = read_regular(path, follow_links=False).decode().split("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", code="unreadable-checksums") from error
    sums: dict[str, str] = {}
    for line in lines[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise RefusedError(f"{path} is broken: {quoted(line)}", code="broken-checksums")
        sums[match[2]] = match[1]
    if lines[-1]:
        raise RefusedError(f"{path} is cut short", code="broken-checksums")
    return sums


def require_sums(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Verify files against their folder's checksums; ValueError names the first one that differs."""
    for name in names:
        path = folder / name
        if name not in sums:
            raise RefusedError(
                f"{path} is not in {folder / SUMS_FILE}: it was not written with the others",
                code="unlisted-file",
            )
        try:
            differs = sha256(path) != sums[name]
        except OSError as error:
            raise RefusedError(f"{path} cannot be read: {error.strerror}", code="unreadable-file") from error
        if differs:
            raise RefusedError(
                f"{path} has changed since it was written: its SHA-256 differs from {folder / SUMS_FILE}",
                code="checksum-differs",
            )


class BackgroundWrite:
    """Runs `write` in a background thread, started at once; its progress counts as the rank's while the rank waits."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._seconds = 0.0

        def run() -> None:
            began, thread = time.monotonic(), threading.get_ident()
            activity.apart[thread] = activity.Progress()
            try:
                write()
            except BaseException as error:  # noqa: BLE001  # raised again by `seconds`
                self._error = cause = error
                while cause is not None:
                    # The frames of an error and its causes keep the copy of the weights alive.
                    traceback.clear_frames(cause.__traceback__)
                    cause = cause.__cause__ or cause.__context__
            finally:
                del activity.apart[thread]
            self._seconds = time.monotonic() - began

        # A daemon thread, so that a hanging disk does not keep the process alive.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def seconds(self, *, wait: bool) -> float | None:
        """Return the write's duration, None while it runs; `wait` blocks until its end. Raises the write's error."""
        if wait:
            self.join()
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._seconds

    def join(self) -> None:
        """Wait for the end, successful or not; meanwhile the write's progress counts as this thread's."""
        seen, thread = activity.Progress(), self._thread
        while thread.is_alive():
            thread.join(_LOOK_EVERY_S)
            found = activity.apart.get(thread.ident or 0, seen)
            if found != seen:
                seen = found
                activity.advance(seen.doing)
