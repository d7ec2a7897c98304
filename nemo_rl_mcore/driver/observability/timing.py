"""Where the time of a step goes: wall and CPU seconds per phase."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

TIMING_PREFIX = "timing/"


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase; `cpu_s` is that of this process alone, all its threads together."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: PhaseTime) -> PhaseTime:
        """Add both clocks."""
        return PhaseTime(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class PhaseTimer:
    """Adds up the time of named phases, for the step at hand and for the whole run.

    Phases may repeat within a step, and are added. A phase inside another one counts in both.
    """

    def __init__(self) -> None:
        self._step: dict[str, PhaseTime] = {}
        self.totals: dict[str, PhaseTime] = {}
        """Seconds of each phase since the timer was made."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the block as phase `name`, also when it raises."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = PhaseTime(time.perf_counter() - wall, time.process_time() - cpu)
            self._step[name] = self._step.get(name, PhaseTime()) + spent
            self.totals[name] = self.totals.get(name, PhaseTime()) + spent

    def end_step(self) -> dict[str, float]:
        """Give the step's seconds, `timing/<phase>` and `timing/<phase>_cpu`, and begin the next step."""
        metrics: dict[str, float] = {}
        for name, spent in self._step.items():
            metrics[f"{TIMING_PREFIX}{name}"] = spent.wall_s
            metrics[f"{TIMING_PREFIX}{name}_cpu"] = spent.cpu_s
        self._step = {}
        return metrics
