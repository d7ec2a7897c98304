"""Everything that watches a run, behind one object: timed phases, sinks, progress and the final report."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.driver.observability.progress import (
    REPORT_FILE,
    STARTUP_PREFIX,
    TIMING_PREFIX,
    ProgressDisplay,
    print_report,
)
from nemo_rl_mcore.driver.observability.sinks import (
    METRICS_FILE,
    EqualRewardsSink,
    JsonlSink,
    RolloutSink,
    Sample,
    complete_rows,
    read_history,
)
from nemo_rl_mcore.driver.output import BestEffortStream, open_console, write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import FolderError, folder_error
from nemo_rl_mcore.rank import activity

_KEY = "logger.log_dir"
_TOKENS = "train/total_num_tokens"
_TOLD_AS = {"restore": "restoring the checkpoint", "weights": "sending the weights to the engines"}
_TOLD_AT_ITS_END = "weights"
"""The engines start with the first weights that they are given, and are told first."""


def finish_report(config: LoggerConfig, write_page: Callable[[Path], object] | None) -> None:
    """Make the page of a run that was killed after its last step; raises FolderError."""
    folder = Path(config.log_dir)
    page, metrics = folder / REPORT_FILE, folder / METRICS_FILE
    try:
        if write_page is None or not metrics.is_file():
            return
        if page.is_file() and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:
            return
        write_page(folder)
        if page.is_file():
            write_line(sys.stdout, str(page))
    except OSError as failure:
        raise folder_error(_KEY, folder, failure) from failure


@dataclass
class Startup:
    """The parts of the start of a run; each second counts in the innermost one."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Of each part that has ended."""
    _unfinished: str = ""
    _inner_s: float = 0.0

    @contextmanager
    def part(self, name: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time the block, which may add the seconds of pieces of it, by name."""
        told_as = told_as or _TOLD_AS[name]
        pieces: dict[str, float] = {}
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
            self.console.print(ended, markup=False, highlight=False, soft_wrap=True)
        if begun:
            text = f"{begun} ..."
            self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        self._unfinished = begun


class RunRecorder:
    """A context manager: `phase` times, `log` ends a step, and leaving it closes what writes, and reports.

    `startup` tells the parts of the start, also before the block; the first step begins when the last of them has
    ended, and the first row has their seconds, `timing/startup/<part>`. To each step it adds `timing/<phase>`,
    `timing/total` (wall seconds since the step before) and `performance/tokens_per_sec`. With `run.resumed_step` it
    goes on with the metrics of an earlier run in the same folder. The report is also written when the block raises,
    about the steps that were finished; a console that takes no more changes nothing else. write_page: makes a page of
    the folder. summary: print tables at the end.
    """

    def __init__(
        self,
        config: LoggerConfig,
        total_steps: int,
        *,
        title: str = "",
        console: Console | None = None,
        run: RunFacts | None = None,
        write_page: Callable[[Path], object] | None = None,
        summary: bool = True,
    ) -> None:
        self._config, self._run = config, run or RunFacts()
        self._log_dir = Path(config.log_dir)
        self._console = console or open_console()
        self._console.file = cast(TextIO, BestEffortStream(self._console.file))
        self._write_page, self._summary = write_page, summary
        steps_before = self._run.resumed_step or 0
        self._progress = ProgressDisplay(
            total_steps, title=title, console=self._console, steps_before=steps_before
        )
        self._startup = Startup(self._console)
        self._shown: deque[Sample] = deque(maxlen=config.num_val_samples_to_print)
        self._loggers = Loggers(config, self._run, self._say)
        self._equal_rewards = EqualRewardsSink(self._say) if self._run.rewards_teach else None
        self._rollouts: RolloutSink | None = None
        self._metrics: JsonlSink | None = None
        self._samples: list[Sample] = []
        self._rows: list[dict[str, float]] = []
        self._attempted: list[Sample] | None = None
        self._redoing = False
        self._opened = ExitStack()
        self._step_began = time.perf_counter()
        self._phases: dict[str, float] = defaultdict(float)
        self.last_row: Mapping[str, float] = {}
        """The metrics that were logged last, and their `step`."""

    def __enter__(self) -> Self:
        resumed_step = self._run.resumed_step
        with self._written():
            self._rollouts = RolloutSink(self._log_dir, self._config.rollouts, resumed_step, self._say)
            self._metrics = JsonlSink(self._log_dir, resumed_step)
            if resumed_step is not None:
                self._rows += read_history(self._log_dir)
                for row in self._rows:
                    self._progress.take(int(row["step"]), row)
        with ExitStack() as opened:
            opened.callback(self._metrics.close)
            if self._equal_rewards is not None:
                opened.callback(self._equal_rewards.close)
            opened.enter_context(self._loggers)
            self._startup.seconds |= self._loggers.startup_s
            opened.callback(self._progress.close)  # first: what loggers say at their end is below the panel
            self._opened = opened.pop_all()
        self._step_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything, then report; raises FolderError where that fails and nothing else ended the run."""
        parts: list[Callable[[], object]] = [partial(self._opened.__exit__, kind, error, trace)]
        if self._rows:
            parts.append(partial(complete_rows, self._log_dir, self._rows))
            if self._write_page is not None:
                parts.append(partial(self._write_page, self._log_dir))
        failures: list[OSError] = []
        with deferred_stop_signals(hold=True):
            for part in (*parts, self._report):
                try:
                    part()
                except OSError as failure:
                    failures.append(failure)
        if failures and not isinstance(error, FolderError):
            told = folder_error(_KEY, self._log_dir, failures[0])
            if error is None:
                raise told
            write_line(sys.stderr, f"{told}: the report is not whole")

    def _report(self) -> None:
        if self._summary:
            print_report(self._log_dir, self._rows, list(self._shown), console=self._console)
        for place in self._loggers.places:
            self._say(place)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _written(self) -> Generator[None]:
        try:
            yield
        except OSError as failure:
            raise folder_error(_KEY, self._log_dir, failure) from failure

    @contextmanager
    def startup(self, part: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time a part of the start or, once steps have begun, as when engines restart, of the step at hand."""
        with activity.at(told_as or part, timed=False):
            if self._progress.begun:
                yield {}
                return
            with self._startup.part(part, told_as) as pieces:
                yield pieces
        self._step_began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a phase of the step, or, where its name begins with `startup/`, a part of the start.

        Phases are added; one inside another counts in both, one that raises as well. CPU seconds are of this process
        alone.
        """
        if name.startswith(STARTUP_PREFIX):
            with self.startup(name.removeprefix(STARTUP_PREFIX)):
                yield
            return
        if self._redoing:
            yield
            return
        self._progress.begin()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            with activity.at(name):
                yield
        finally:
            self._phases[name] += time.perf_counter() - wall
            self._phases[f"{name}_cpu"] += time.process_time() - cpu

    def checkpointed(self, step: int) -> None:
        self._progress.saved(step)

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Take the samples that are added in the block only where it does not raise."""
        outer, self._attempted = self._attempted, []
        try:
            yield
            added = self._attempted
        finally:
            self._attempted = outer
        self.add_samples(added)

    @contextmanager
    def redoing(self) -> Generator[None]:
        """Time the block as the phase `recovery`: what it trains again was timed and recorded before."""
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
            self._rollouts.log(step, samples)  # the answers of a step are there before its row tells of it
            self._metrics.log(step, row)
            self._progress.log(step, row)
            if self._equal_rewards is not None:
                self._equal_rewards.log(step, row)
            self._loggers.log(step, row, samples)

    def add_samples(self, samples: Iterable[Sample]) -> None:
        if self._attempted is not None:
            self._attempted += samples
            return
        samples = list(samples)
        self._samples += samples
        self._shown.extend(sample for sample in samples if sample.sample_index == 0)
