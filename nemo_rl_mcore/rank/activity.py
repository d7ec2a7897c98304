"""Progress of this process, for health checks and stall reports.

A rank or an engine counts finished pieces of work, so that a waiting caller can distinguish slow from stuck.
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


@dataclass(frozen=True)
class Progress:
    """A reading of the counter. doing: description of the piece of work that was started last."""

    count: int = 0
    doing: str = "starting"


latest = Progress()
"""The current reading."""
apart: dict[int, Progress] = {}
"""Readings of background threads, by thread: their progress must not hide a stuck call in the main thread."""
loading_s = 0.0
"""Seconds in which this process has loaded weights from disk."""


def advance(doing: str) -> None:
    """Count one more piece of work, and describe the next; cheap enough for every token and every tensor."""
    global latest
    thread = threading.get_ident()
    if (own := apart.get(thread)) is not None:
        apart[thread] = Progress(own.count + 1, doing)
    else:
        latest = Progress(latest.count + 1, doing)


def stack_of(thread: int, without: str = "\0") -> str:
    """Return the innermost frames of a thread, leaving out files below the folder `without`."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in frames if not entry.filename.startswith(without)]
    return "".join(traceback.format_list(own[-_FRAMES_SHOWN:])).rstrip()


@contextmanager
def loading() -> Generator[None]:
    """Add the block's duration to `loading_s`."""
    global loading_s
    began = time.monotonic()
    yield
    loading_s += time.monotonic() - began
