"""A limit of time: the last checkpoint is to be on disk before it is over."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Self

from nemo_rl_mcore.driver.signals import current_stop_signals


class TimeLimit:
    """A context manager that ends a run while its last step can still be saved, as long as steps and saves have taken.

    seconds: from the start of the process's command to the end of the save; None: no limit. Until a save has been
    timed it is taken to be as long as the longest step.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._signals = current_stop_signals()
        self._longest_step = 0.0
        self._longest_save: float | None = None
        self._saves_at_the_end = 1

    def __enter__(self) -> Self:
        """Begin to watch the time."""
        self._set()
        return self

    def __exit__(self, *_error: object) -> None:
        """Watch it no more: how the run has ended is settled."""
        self._signals.limit_time(None)

    @contextmanager
    def step(self) -> Generator[None]:
        """Time a step, validation included."""
        began = time.monotonic()
        yield
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self._set()

    def saved(self, seconds: float) -> None:
        """Take note of how long a save took, in the background or not."""
        self._longest_save = max(self._longest_save or 0.0, seconds)
        self._set()

    def saving(self, begun: bool) -> None:
        """Take note whether a save goes on in the background: it must end before another one begins."""
        self._saves_at_the_end = 2 if begun else 1
        self._set()

    def stop_if_the_next_step_does_not_fit(self) -> None:
        """Raise TimeLimitReachedError."""
        if self._seconds is None:
            return
        passed = time.monotonic() - self._signals.began
        if passed + self._longest_step + self._time_of_saves() >= self._seconds:
            self._signals.end_for_time()

    def _time_of_saves(self) -> float:
        one = self._longest_step if self._longest_save is None else self._longest_save
        return self._saves_at_the_end * one

    def _set(self) -> None:
        """Have a step that takes longer than those before stopped in time for the save."""
        if self._seconds is not None:
            self._signals.limit_time(self._seconds - self._time_of_saves())
