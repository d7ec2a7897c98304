"""The errors that end a run with a message instead of a traceback, and the codes that tell refusals apart."""

import os
import shutil
from pathlib import Path


class CodedError(Exception):
    """An error with a `code` that stays when its words change, in kebab-case; empty where its type says it all.

    No class sets `code`: what Ray raises of an error that a worker raised looks there first, and has it of the error.
    """

    code: str

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RefusedError(CodedError, ValueError):
    """Values that cannot be taken; `code` says which rule they break."""


class RunStoppedError(CodedError, RuntimeError):
    """A run cannot go on for a reason its user can act on; the message says what happened, where, and the remedy."""


class PeerLostError(RunStoppedError):
    """A rank hangs, or has ended, while the others wait for it."""


class RanksFailedError(RunStoppedError):
    """Ranks of a model, or engines, raised, died or hang.

    group: their name, such as "policy". usable: every one of them has answered, if only by raising, and can be called
    again. final: there is nothing left to start others with. lost_node: the machine that is gone, if that is why.
    """

    group: str = ""
    usable: bool = False
    final: bool = False
    lost_node: str | None = None


class CustomCodeError(RunStoppedError, ValueError):
    """Code of the user's own, named in a recipe, raised or gave what it must not; the message names its key."""


class ChangedRunError(RunStoppedError):
    """Checkpoints are there of a run with another recipe, code or data; keys: what has changed."""

    keys: tuple[str, ...] = ()


class FolderError(RunStoppedError):
    """A folder of the run cannot be written to; the message names its key."""


def code_of(error: BaseException | None) -> str:
    """Return the code of an error, for one that takes its words over; empty if it has none."""
    return error.code if isinstance(error, CodedError) else ""


def run_stopped_by(error: BaseException | None) -> RunStoppedError | None:
    """Return the error itself or the newest one behind it: a delayed signal takes the place of what came before."""
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
    """Return what to say of a write that failed: the key, the folder, and why."""
    reason = error.strerror or str(error)
    if not folder.is_dir():
        reason = f"the folder is gone ({reason})" if isinstance(error, FileNotFoundError) else reason
    elif os.access(folder, os.R_OK):
        reason = f"{reason} ({_size(shutil.disk_usage(folder).free)} free)"
    return FolderError(f"{key}: {folder} cannot be written to: {reason}{remedy and '; '}{remedy}")


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


def shortened(text: str, limit: int = 60) -> str:
    """Return the text, cut for a message."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(value: object) -> str:
    """Return what a file has, as Python writes it, cut for a message."""
    return shortened(repr(value))
