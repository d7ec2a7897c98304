"""Progress of this process, for health checks and stall reports.

A rank or an engine counts finished pieces of work, so that a caller that waits can tell slow from stuck.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

_FRAMES_SHOWN = 12


def stack_of(thread: int, without: str = "\0") -> str:
    """Return the innermost frames of a thread, leaving out files below the folder `without`."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in frames if not entry.filename.startswith(without)]
    return "".join(traceback.format_list(own[-_FRAMES_SHOWN:])).rstrip()


@dataclass(frozen=True)
class Progress:
    """A reading of the counter. doing: description of the piece of work that was started last."""

    count: int = 0
    doing: str = "starting"


@dataclass
class Apart:
    """A separate counter for a background thread, whose progress must not hide a stuck call in the main thread."""

    progress: Progress = Progress()


_latest = Progress()
_apart: dict[int, Apart] = {}
"""By thread."""
loading_s = 0.0
"""Seconds in which this process has loaded weights from disk."""


def advance(doing: str) -> None:
    """Count one more piece of work, and describe the next; cheap enough for every token and every tensor."""
    global _latest
    thread = threading.get_ident()
    if (apart := _apart.get(thread)) is not None:
        apart.progress = Progress(apart.progress.count + 1, doing)
    else:
        _latest = Progress(_latest.count + 1, doing)


def current() -> Progress:
    """Return the current reading; callable from any thread."""
    return _latest


@contextmanager
def counted_by(apart: Apart) -> Generator[None]:
    """Count this thread's work in `apart` instead of the process's counter."""
    thread = threading.get_ident()
    _apart[thread] = apart
    try:
        yield
    finally:
        del _apart[thread]


@contextmanager
def loading() -> Generator[None]:
    """Add the block's duration to `loading_s`."""
    global loading_s
    began = time.monotonic()
    yield
    loading_s += time.monotonic() - began
