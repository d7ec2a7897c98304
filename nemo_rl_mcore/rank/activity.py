"""What this process does, for whoever watches it.

A rank or an engine counts the pieces of work that are done, so that who waits for it sees that it goes on. The driver's
threads say what they are at, which its stall watch reports.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

_FRAMES_SHOWN = 12


@dataclass(frozen=True)
class Activity:
    """what: says it, as it is now, to any thread that asks. timed: see `at`. since: by the monotonic clock."""

    what: Callable[[], str]
    timed: bool | None
    since: float


_of_threads: dict[int, list[Activity]] = {}
"""By thread, the outermost block first."""


@contextmanager
def at(what: str | Callable[[], str], *, timed: bool | None = None) -> Generator[None]:
    """Say that this thread is at something for as long as the block takes.

    timed: whether a watch counts the time; not what rightly takes long, or ends by a deadline of its own. None: as the
    block around this one; without any, it counts.
    """
    stack = _of_threads.setdefault(threading.get_ident(), [])
    stack.append(Activity((lambda: what) if isinstance(what, str) else what, timed, time.monotonic()))
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            del _of_threads[threading.get_ident()]


def is_timed(thread: int) -> bool:
    """Return whether the time of what a thread is at counts."""
    said = [one.timed for one in (*_of_threads.get(thread, ()),) if one.timed is not None]
    return said[-1] if said else True


def describe(thread: int) -> str:
    """Return what a thread is at, each block with the seconds since it began, the outermost first."""
    now = time.monotonic()
    return ", ".join(f"{one.what()} ({now - one.since:.1f} s)" for one in (*_of_threads.get(thread, ()),))


def stack_of(thread: int, without: str = "\0") -> str:
    """Return the innermost frames of a thread, without those of files below a folder."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in frames if not entry.filename.startswith(without)]
    return "".join(traceback.format_list(own[-_FRAMES_SHOWN:])).rstrip()


@dataclass(frozen=True)
class Progress:
    """A reading of the counter. doing: the piece of work that was begun last, as a person would say it."""

    count: int = 0
    doing: str = "starting"


@dataclass
class Apart:
    """The counter of a background thread, whose work must not hide that the call in the main thread stands still."""

    progress: Progress = Progress()


_latest = Progress()
_apart: dict[int, Apart] = {}
"""By thread."""
loading_s = 0.0
"""Seconds in which this process has loaded weights from disk."""


def advance(doing: str) -> None:
    """Say that a piece of work is done, and what comes next; cheap enough for every token and every tensor."""
    global _latest
    thread = threading.get_ident()
    if (apart := _apart.get(thread)) is not None:
        apart.progress = Progress(apart.progress.count + 1, doing)
    else:
        _latest = Progress(_latest.count + 1, doing)


def current() -> Progress:
    """Return the reading now; it may be taken by any thread."""
    return _latest


@contextmanager
def counted_by(apart: Apart) -> Generator[None]:
    """Count what this thread does there, and not for the process."""
    thread = threading.get_ident()
    _apart[thread] = apart
    try:
        yield
    finally:
        del _apart[thread]


@contextmanager
def loading() -> Generator[None]:
    """Count the block as time in which weights are loaded."""
    global loading_s
    began = time.monotonic()
    yield
    loading_s += time.monotonic() - began
