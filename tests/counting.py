"""Count what a run of tests starts, in numbers that no busy machine changes: `pytest --counts tests/counts.json`.

Every Python process that a test starts counts for itself: it loads tests/counted/sitecustomize.py, of which the run
puts a copy on PYTHONPATH. The file holds the most that is allowed, and the CPU seconds of the run divided by those of a
fixed calculation, which is done now and then during the run; the run fails where it needs more.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

CPU = "CPU seconds, calibrated"
ALLOWED = 1.3
"""Times the recorded CPU seconds; below it more than was recorded is a warning."""
_EVERY_S = 20.0


class Counts:
    """Counts from the start of a run of tests to its end, and compares with a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._folder = Path(tempfile.mkdtemp())
        shutil.copy(Path(__file__).parent / "counted/sitecustomize.py", self._folder)
        paths = filter(None, [str(self._folder), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self._calibration = _Calibration()

    @pytest.hookimpl(trylast=True)  # pytest-xdist has waited for its processes
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._found = self._counted()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._recorded = json.loads(self._file.read_text())
        self._exceeded = exceeded(self._found, self._recorded)
        if self._exceeded and exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"counts, compared with {self._file}")
        terminalreporter.write_line(json.dumps(self._found, indent=2))
        for line in self._exceeded:
            terminalreporter.write_line(line, red=True)
        if self._found[CPU] > self._recorded[CPU]:
            terminalreporter.write_line(f"warning: more than the {self._recorded[CPU]} {CPU}", yellow=True)

    def _counted(self) -> dict[str, float]:
        file = self._folder / "counts"
        counts = Counter(file.read_text().splitlines() if file.exists() else [])
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        calibrated = (used.ru_utime + used.ru_stime) / self._calibration.end()
        return {**dict(sorted(counts.items())), CPU: round(calibrated, 1)}


def exceeded(found: dict[str, float], recorded: dict[str, float]) -> list[str]:
    return [
        f"{what}: {found[what]}, and {recorded.get(what, 0)} are recorded"
        for what in found
        if found[what] > recorded.get(what, 0) * (ALLOWED if what == CPU else 1)
    ]


class _Calibration:
    """Measures a fixed calculation now and then, next to the tests, under whatever slows them down."""

    def __init__(self) -> None:
        self._found = [_calculation_s()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="calibration", daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return statistics.median(self._found)

    def _measure(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._found.append(_calculation_s())


def _calculation_s() -> float:
    """Return the CPU seconds of a calculation in Python and in C, as tests consist of both."""
    start = time.thread_time()
    digest = hashlib.sha256()
    for number in range(300_000):
        digest.update(f"{number:08}".encode() * 32)
    return time.thread_time() - start
