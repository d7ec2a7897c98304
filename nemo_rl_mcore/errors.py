"""Errors that end a run with a message instead of a traceback, and codes that distinguish refusals."""

import os
import shutil
from pathlib import Path


class CodedError(Exception):
    """An error with a stable kebab-case `code`, which is empty if the error's type is enough.

    No class sets `code`: Ray's wrapper around a worker's error would return the class value before the error's own.
    """

    code: str

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RefusedError(CodedError, ValueError):
    """Values were refused; `code` names the rule that they break."""


class RunStoppedError(CodedError, RuntimeError):
    """A run cannot continue; the message gives the cause, the place and a remedy."""


class PeerLostError(RunStoppedError):
    """A rank hangs or has exited while the other ranks wait for it."""


class RanksFailedError(RunStoppedError):
    """A model's ranks or engines raised an error, died or hang.

    group: the group's name, such as "policy". usable: every member responded, even with an error, and can be called
    again. final: no replacement can be started. lost_node: the lost machine, if that is the cause.
    """

    group: str = ""
    usable: bool = False
    final: bool = False
    lost_node: str | None = None


class CustomCodeError(RunStoppedError, ValueError):
    """User code named in a recipe raised an error or returned a bad value; the message names its key."""


class ChangedRunError(RunStoppedError):
    """The existing checkpoints belong to a run with another recipe, code or data. keys: changed settings."""

    keys: tuple[str, ...] = ()


class FolderError(RunStoppedError):
    """A run's folder is not writable; the message names the folder's key."""


def code_of(error: BaseException | None) -> str:
    """Return an error's code, or an empty string if the error has none."""
    return error.code if isinstance(error, CodedError) else ""


def run_stopped_by(error: BaseException | None) -> RunStoppedError | None:
    """Return the newest RunStoppedError in the error's chain, since a delayed signal can mask the original error."""
    seen: set[int] = set()
    left = [error]
    while left:
        error = left.pop()
        if isinstance(error, RunStoppedError):
            return error
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            left += [error.__cause__, error.__context__]
    return None


def folder_error(key: str, folder: Path, error: OSError, remedy: str = "") -> FolderError:
    """Return the error for a failed write, with the key, the folder and the reason."""
    reason = error.strerror or str(error)
    if not folder.is_dir():
        if isinstance(error, FileNotFoundError):
            reason = f"the folder is gone ({reason})"
    elif os.access(folder, os.R_OK):
        reason = f"{reason} ({size_of(shutil.disk_usage(folder).free)} free)"
    return FolderError(f"{key}: {folder} cannot be written to: {reason}{remedy and '; '}{remedy}")


def size_of(number: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


def shortened(text: str, limit: int = 60) -> str:
    """Return the text, cut to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(value: object) -> str:
    """Return the value's repr, shortened for a message."""
    return shortened(repr(value))
