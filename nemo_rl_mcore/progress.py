"""How far this process has come, for whoever waits for it: a counter that goes up whenever a piece of work is done."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A reading of the counter. doing: the piece of work that was begun last, as a person would say it."""

    count: int = 0
    doing: str = "starting"


_latest = Progress()
loading_s = 0.0
"""Seconds in which this process has loaded weights from disk."""


def advance(doing: str) -> None:
    """Say that a piece of work is done, and what comes next; cheap enough for every token and every tensor."""
    global _latest
    _latest = Progress(_latest.count + 1, doing)


def current() -> Progress:
    """The reading now; it may be taken by any thread."""
    return _latest


@contextmanager
def loading() -> Generator[None]:
    """Count the block as time in which weights are loaded."""
    global loading_s
    began = time.monotonic()
    yield
    loading_s += time.monotonic() - began
