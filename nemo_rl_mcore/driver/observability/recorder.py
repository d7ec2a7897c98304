"""Everything that watches a run, behind one object: timed phases, sinks, progress and the final report."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability.loggers import Loggers
from nemo_rl_mcore.driver.observability.progress import STARTUP_PREFIX, TIMING_PREFIX, ProgressDisplay
from nemo_rl_mcore.driver.observability.report import REPORT_FILE, print_report
from nemo_rl_mcore.driver.observability.rollouts import RolloutSink, Sample
from nemo_rl_mcore.driver.observability.services import RunFacts
from nemo_rl_mcore.driver.observability.sinks import (
    METRICS_FILE,
    EqualRewardsSink,
    JsonlSink,
    complete_rows,
    read_history,
)
from nemo_rl_mcore.driver.output import BestEffortStream, open_console, write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import FolderError, folder_error
from nemo_rl_mcore.rank import activity

type MetricSink = RolloutSink | JsonlSink | ProgressDisplay | EqualRewardsSink | Loggers
"""What takes the metrics of each step."""
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
        if write_page is None or not (config.html_report_enabled and metrics.is_file()):
            return
        if page.is_file() and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:
            return
        write_page(folder)
        if page.is_file():
            write_line(sys.stdout, str(page))
    except OSError as failure:
        raise folder_error(_KEY, folder, failure) from failure


class Startup:
    """The parts of the start of a run, each told as it begins, with its seconds as it ends.

    They may lie inside each other; each second counts in the innermost one.
    """

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
        if self._unfinished != told_as:
            self._begin(told_as)
        named = ", ".join(f"{piece.replace('_', ' ')} {part:.1f} s" for piece, part in pieces.items())
        self._end_line(f" {own:.1f} s" + (f" ({named})" if named else ""))

    def _begin(self, told_as: str) -> None:
        self._end_line()
        self._print(f"{told_as} ...", end="")
        self._unfinished = told_as

    def _end_line(self, text: str = "") -> None:
        if self._unfinished:
            self._print(text)
            self._unfinished = ""

    def _print(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


class RunRecorder:
    """A context manager: `phase` times, `log` ends a step, and leaving it closes the sinks and reports.

    Loggers that the config asks for are told of `run`, and can fail without an effect on it.
    `startup` times and tells the parts of the start, also before the block; the first step begins when the last of
    them has ended. The first row has their seconds, `timing/startup/<part>`.
    The report is also written when the block raises or is interrupted, about the steps that were finished. A console
    that takes no more, as when its terminal is closed, changes nothing else.
    To each step it adds `timing/<phase>`, `timing/total` (wall seconds since the step before) and, when the
    step has `train/total_num_tokens`, `performance/tokens_per_sec`. With `run.resumed_step` it goes on with the metrics
    of an earlier run in the same folder, up to that step. write_page: makes a page of the folder, at the end.
    summary: whether the end prints the tables of the metrics.
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
        self._rollouts: RolloutSink | None = None
        self._sinks: list[MetricSink] = []
        self._rows: list[dict[str, float]] = []
        self._attempted: list[Sample] | None = None
        self._redoing = False
        self._opened = ExitStack()
        self._step_began = time.perf_counter()
        self._phases: dict[str, float] = defaultdict(float)
        self.last_row: Mapping[str, float] = {}
        """The metrics that were logged last, and their `step`."""

    def __enter__(self) -> Self:
        """Open the sinks and start the display."""
        resumed_step = self._run.resumed_step
        with self._written():
            self._rollouts = RolloutSink(self._log_dir, self._config.rollouts, resumed_step, self._say)
            metrics = JsonlSink(self._log_dir, resumed_step)
            if resumed_step is not None:
                self._rows += read_history(self._log_dir)
                self._progress.recall(self._rows)
        # The answers of a step are there before its row tells of it.
        self._sinks = [self._rollouts, metrics, self._progress]
        if self._run.rewards_teach:
            self._sinks.append(EqualRewardsSink(self._say))
        self._sinks.append(self._loggers)
        with ExitStack() as opened:
            for sink in self._sinks:
                opened.callback(sink.close)
            opened.enter_context(self._loggers)
            self._startup.seconds |= self._loggers.startup_s
            opened.callback(
                self._progress.close
            )  # the panel first: what loggers say at their end stands below it
            self._opened = opened.pop_all()
        self._step_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything, then report; raises FolderError where that fails and nothing else ended the run."""
        with deferred_stop_signals(hold=True):
            failures = list(self._end(partial(self._opened.__exit__, kind, error, trace)))
        if failures and not isinstance(error, FolderError):
            told = folder_error(_KEY, self._log_dir, failures[0])
            if error is None:
                raise told
            write_line(sys.stderr, f"{told}: the report is not whole")

    def _end(self, close: Callable[[], object]) -> Iterator[OSError]:
        """Yield what fails; each part is tried."""
        for part in (close, self._complete_rows, self._page, self._report):
            try:
                part()
            except OSError as failure:
                yield failure

    def _complete_rows(self) -> None:
        if self._rows:
            complete_rows(self._log_dir, self._rows)

    def _page(self) -> None:
        if self._rows and self._write_page is not None and self._config.html_report_enabled:
            self._write_page(self._log_dir)

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
        """Time a part of the start, see `Startup.part`; nothing of it belongs to the first step.

        Once steps have begun, as when engines restart, it is a part of the step at hand.
        """
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

        Phases may repeat within a step, and are added; one inside another counts in both, one that raises as well.
        CPU seconds are those of this process alone, all its threads together.
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
        """Say that the checkpoint of a step is whole."""
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
        """Record a finished step everywhere."""
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
        with self._written():
            for sink in self._sinks:
                sink.log(step, row)

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Take the answers of the step at hand, which are written when it is logged."""
        if self._attempted is not None:
            self._attempted += samples
            return
        assert self._rollouts is not None
        samples = list(samples)
        self._rollouts.add(samples)
        self._loggers.add(samples)
        self._shown.extend(sample for sample in samples if sample.sample_index == 0)
