"""What happens before the first step: each part is told as it begins, with its seconds as it ends."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

STARTUP_PREFIX = "startup/"
"""Of the phases that are parts of the start."""
_TOLD_AS = {"restore": "restoring the checkpoint", "weights": "sending the weights to the engines"}
_TOLD_AT_ITS_END = "weights"
"""The engines start with the first weights that they are given, and are told first."""


class Startup:
    """The parts of the start of a run, which may lie inside each other; each second counts in the innermost one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unfinished = ""
        self._inner_s = 0.0
        self.seconds: dict[str, float] = {}
        """Of each part that has ended."""

    @contextmanager
    def part(self, name: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time the block, which may add the seconds of pieces of it, by name."""
        told_as = told_as or _TOLD_AS[name]
        pieces: dict[str, float] = {}
        if name != _TOLD_AT_ITS_END:
            self._begin(told_as)
        began, inner_before = time.perf_counter(), self._inner_s
        try:
            yield pieces
        except BaseException:
            self._end_line()
            raise
        whole = time.perf_counter() - began
        own = whole - (self._inner_s - inner_before)
        self._inner_s = inner_before + whole
        self.seconds |= {name: own, **pieces}
        self._end(told_as, own, pieces)

    def _begin(self, told_as: str) -> None:
        self._end_line()
        self._print(f"{told_as} ...", end="")
        self._unfinished = told_as

    def _end(self, told_as: str, seconds: float, pieces: dict[str, float]) -> None:
        if self._unfinished != told_as:
            self._begin(told_as)
        named = ", ".join(f"{name.replace('_', ' ')} {part:.1f} s" for name, part in pieces.items())
        self._print(f" {seconds:.1f} s" + (f" ({named})" if named else ""))
        self._unfinished = ""

    def _end_line(self) -> None:
        if self._unfinished:
            self._print("")
            self._unfinished = ""

    def _print(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
