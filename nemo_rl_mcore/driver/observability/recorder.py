"""A single object for a run's records: timed phases, sinks, progress and the final report."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.driver.observability.progress import (
    STARTUP_PREFIX,
    TIMING_PREFIX,
    ProgressDisplay,
    print_report,
)
from nemo_rl_mcore.driver.observability.sinks import (
    JsonlSink,
    RolloutSink,
    Sample,
    complete_rows,
    read_history,
)
from nemo_rl_mcore.driver.output import open_console, print_plain, write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import FolderError, folder_error

_KEY = "logger.log_dir"
_TOKENS = "train/total_num_tokens"
_TOLD_AS = {"restore": "restoring the checkpoint", "weights": "sending the weights to the engines"}
_TOLD_AT_ITS_END = "weights"
"""This part is printed at its end, since it also starts the engines, which are printed first."""


@dataclass
class Startup:
    """Times the parts of a run's start; each second counts only in the innermost part."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _unfinished: str = ""
    _inner_s: float = 0.0

    @contextmanager
    def part(self, name: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time the block, which may add its own pieces' seconds by name."""
        told_as, pieces = told_as or _TOLD_AS[name], dict[str, float]()
        if name != _TOLD_AT_ITS_END:
            self._tell(begun=told_as)
        began, inner_before = time.perf_counter(), self._inner_s
        try:
            yield pieces
        except BaseException:
            self._tell()
            raise
        whole = time.perf_counter() - began
        own = whole - (self._inner_s - inner_before)
        self._inner_s = inner_before + whole
        self.seconds |= {name: own, **pieces}
        if self._unfinished != told_as:
            self._tell(begun=told_as)
        named = ", ".join(f"{piece.replace('_', ' ')} {part:.1f} s" for piece, part in pieces.items())
        self._tell(f" {own:.1f} s" + (f" ({named})" if named else ""))

    def _tell(self, ended: str = "", begun: str = "") -> None:
        if self._unfinished:
            print_plain(self.console, ended)
        if begun:
            print_plain(self.console, f"{begun} ...", end="")
        self._unfinished = begun


class RunRecorder:
    """A context manager: `phase` times a block, `log` ends a step, and the exit closes all files and reports.

    `startup` prints the parts of the start, even before the block; the first step begins after the last of them, and
    the first row has their seconds as `timing/startup/<part>`. Each step gets `timing/<phase>`, `timing/total` (wall
    seconds since the step before) and `performance/tokens_per_sec`. With `run.resumed_step` it continues the folder's
    metrics. An error in the block does not prevent the report. write_page: writes a page about the folder. summary:
    print samples and paths at the end.
    """

    def __init__(
        self,
        config: LoggerConfig,
        total_steps: int,
        *,
        console: Console | None = None,
        run: RunFacts | None = None,
        write_page: Callable[[Path], object] | None = None,
        summary: bool = True,
    ) -> None:
        self._config, self._run = config, run or RunFacts()
        self._log_dir = Path(config.log_dir)
        self._console = console or open_console()
        self._write_page, self._summary = write_page, summary
        before = self._run.resumed_step or 0
        self._progress = ProgressDisplay(total_steps, console=self._console, steps_before=before)
        self._startup = Startup(self._console)
        self._shown: deque[Sample] = deque(maxlen=config.num_val_samples_to_print)
        self._loggers = Loggers(config, self._run, partial(print_plain, self._console))
        self._rollouts: RolloutSink | None = None
        self._metrics: JsonlSink | None = None
        self._samples: list[Sample] = []
        self._rows: list[dict[str, float]] = []
        self._attempted: list[Sample] | None = None
        self._redoing = False
        self._began: float | None = None  # set by a step's first phase
        self._step_began = time.perf_counter()
        self._phases: dict[str, float] = defaultdict(float)
        self.last_row: Mapping[str, float] = {}

    def __enter__(self) -> Self:
        resumed_step = self._run.resumed_step
        with self._written():
            self._rollouts = RolloutSink(self._log_dir, self._config, resumed_step)
            self._metrics = JsonlSink(self._log_dir, resumed_step)
            if resumed_step is not None:
                self._rows += read_history(self._log_dir)
                for row in self._rows:
                    self._progress.take(int(row["step"]), row)
        self._loggers.open()
        self._startup.seconds |= self._loggers.startup_s
        self._step_began = time.perf_counter()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close everything, then report; raise FolderError if closing fails and no other error ended the run."""
        assert self._metrics is not None
        parts: list[Callable[[], object]] = [partial(self._loggers.finish, error), self._metrics.close]
        if self._rows:
            parts.append(partial(complete_rows, self._log_dir, self._rows))
            if self._write_page is not None:
                parts.append(partial(self._write_page, self._log_dir))
        if self._summary:
            report = partial(print_report, self._log_dir, self._rows, self._shown)
            parts.append(partial(report, console=self._console))
        failures: list[OSError] = []
        with deferred_stop_signals(hold=True):
            for part in parts:
                try:
                    part()
                except OSError as failure:
                    failures.append(failure)
        if failures and not isinstance(error, FolderError):
            told = folder_error(_KEY, self._log_dir, failures[0])
            if error is None:
                raise told
            write_line(sys.stderr, f"{told}: the report is not whole")

    @contextmanager
    def _written(self) -> Generator[None]:
        try:
            yield
        except OSError as failure:
            raise folder_error(_KEY, self._log_dir, failure) from failure

    @contextmanager
    def startup(self, part: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time a part of the start or, if engines restart, of the current step."""
        with activity.at(told_as or part, timed=False):
            if self._began is not None:
                yield {}
                return
            with self._startup.part(part, told_as) as pieces:
                yield pieces
        self._step_began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a phase of the step or, if the name begins with `startup/`, a part of the start.

        Repeated phases add up; an inner phase also counts in the outer one, and a phase that raises counts, too. CPU
        seconds are this process's.
        """
        if name.startswith(STARTUP_PREFIX):
            with self.startup(name.removeprefix(STARTUP_PREFIX)):
                yield
            return
        if self._redoing:
            yield
            return
        self._began = self._began or time.perf_counter()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            with activity.at(name):
                yield
        finally:
            self._phases[name] += time.perf_counter() - wall
            self._phases[f"{name}_cpu"] += time.process_time() - cpu

    def checkpointed(self, step: int) -> None:
        print_plain(self._console, f"checkpoint saved: step {step}")

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Keep samples added in the block only if the block does not raise."""
        outer, self._attempted = self._attempted, []
        try:
            yield
            added = self._attempted
        finally:
            self._attempted = outer
        self.add_samples(added)

    @contextmanager
    def redoing(self) -> Generator[None]:
        """Time the block as the phase `recovery`; its steps have already been timed and recorded."""
        with self.phase("recovery"), self.attempt():
            self._redoing = True
            try:
                yield
            finally:
                self._redoing = False
                self._attempted = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        self._began = self._began or now
        row = {**metrics, **{f"{TIMING_PREFIX}{name}": s for name, s in self._phases.items()}}
        row[f"{TIMING_PREFIX}total"] = seconds
        row |= {f"{TIMING_PREFIX}{STARTUP_PREFIX}{part}": s for part, s in self._startup.seconds.items()}
        self._phases.clear()
        self._startup.seconds.clear()
        if _TOKENS in row:
            row["performance/tokens_per_sec"] = row[_TOKENS] / seconds
        self.last_row = {"step": step, **row}
        self._rows.append({"step": step, **row})
        samples, self._samples = self._samples, []
        assert self._rollouts is not None
        assert self._metrics is not None
        with self._written():
            self._rollouts.log(step, samples)  # written before the row that refers to them
            self._metrics.log(step, row)
            self._progress.log(step, row, now - self._began)
            self._loggers.log(step, row, samples)

    def add_samples(self, samples: Iterable[Sample]) -> None:
        if self._attempted is not None:
            self._attempted += samples
            return
        samples = list(samples)
        self._samples += samples
        self._shown.extend(sample for sample in samples if sample.sample_index == 0)
