"""Everything that watches a run, behind one object: timed phases, sinks, progress and the final report."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.console import open_console
from nemo_rl_mcore.driver.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.driver.observability.progress import ProgressDisplay
from nemo_rl_mcore.driver.observability.report import REPORT_FILE, HistorySink, print_report, read_history
from nemo_rl_mcore.driver.observability.rollouts import RolloutSink, Sample
from nemo_rl_mcore.driver.observability.sinks import (
    METRICS_FILE,
    EqualRewardsSink,
    JsonlSink,
    MetricSink,
    complete_rows,
)
from nemo_rl_mcore.driver.observability.startup import STARTUP_PREFIX, Startup
from nemo_rl_mcore.driver.observability.timing import TIMING_PREFIX, PhaseTimer
from nemo_rl_mcore.driver.output import BestEffortStream, write_line
from nemo_rl_mcore.driver.own_files import open_to_append
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import FolderError, folder_error
from nemo_rl_mcore.rank import activity

_KEY = "logger.log_dir"
_RESERVED_BYTES = 1 << 19
"""Kept free for the last row, should the disk be full one day."""
_RESERVED_FOR_THE_PAGE = 6 << 20
"""Kept free for report.html, of which the library that draws takes 4.7 MB."""
_RESERVE_FILE = ".reserve"
_TOKENS = "train/total_num_tokens"


def finish_report(config: LoggerConfig, write_page: Callable[[Path], object] | None) -> None:
    """Do what a run that was killed after its last step still had to: give back the room, and make the page.

    Raises FolderError.
    """
    folder = Path(config.log_dir)
    page, metrics = folder / REPORT_FILE, folder / METRICS_FILE
    try:
        (folder / _RESERVE_FILE).unlink(missing_ok=True)
        if write_page is None or not (config.html_report_enabled and metrics.is_file()):
            return
        if page.is_file() and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:
            return
        write_page(folder)
        if page.is_file():
            write_line(sys.stdout, str(page))
    except OSError as failure:
        raise folder_error(_KEY, folder, failure) from failure


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
        run = run or RunFacts()
        self._config = config
        self._log_dir = Path(config.log_dir)
        self._reserve = self._log_dir / _RESERVE_FILE
        self._console = console or open_console()
        self._console.file = cast(TextIO, BestEffortStream(self._console.file))
        self._history = HistorySink()
        self._resumed_step, self._rewards_teach = run.resumed_step, run.rewards_teach
        self._write_page, self._summary = write_page, summary
        self._progress = ProgressDisplay(
            total_steps, title=title, console=self._console, steps_before=run.resumed_step or 0
        )
        self._startup = Startup(self._console)
        self._shown: deque[Sample] = deque(maxlen=config.num_val_samples_to_print)
        self._rollouts: RolloutSink | None = None
        self._loggers = Loggers(config, run, self._say)
        self._sinks: list[MetricSink] = []
        self._attempted: list[Sample] | None = None
        self._redoing = False
        self._opened = ExitStack()
        self._step_began = time.perf_counter()
        self.last_row: Mapping[str, float] = {}
        """The metrics that were logged last, and their `step`."""
        self.timer = PhaseTimer()

    def __enter__(self) -> Self:
        """Open the sinks and start the display."""
        with self._written(), self._room_given_back_on_failure():
            self._rollouts = RolloutSink(self._log_dir, self._config.rollouts, self._resumed_step, self._say)
            metrics = JsonlSink(self._log_dir, self._resumed_step)
            self.give_back_room()
            self._keep_room()
            if self._resumed_step is not None:
                self._history.rows += read_history(self._log_dir)
                self._progress.recall(self._history.rows)
        # The answers of a step are there before its row tells of it.
        self._sinks = [
            self._history,
            self._rollouts,
            metrics,
            self._progress,
            *([EqualRewardsSink(self._say)] if self._rewards_teach else []),
            self._loggers,
        ]
        with ExitStack() as opened:
            for sink in self._sinks:
                opened.callback(sink.close)
            opened.enter_context(self._loggers)
            self._startup.seconds |= self._loggers.startup_s
            opened.enter_context(self._progress)
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
        for part in (
            self.give_back_room,
            self._complete_answers,
            close,
            self._complete,
            self._page,
            self._report,
        ):
            try:
                part()
            except OSError as failure:
                yield failure

    def give_back_room(self) -> None:
        """Free what is kept on the disk for the end of the run."""
        with suppress(OSError):  # a folder that takes nothing any more is told by what is written there next
            self._reserve.unlink(missing_ok=True)

    def _complete_answers(self) -> None:
        assert self._rollouts is not None
        try:
            self._rollouts.complete()
        except OSError:
            for path in self._rollouts.unwritten:
                write_line(sys.stderr, f"{path} cannot be written: these answers are lost")
            raise

    def _complete(self) -> None:
        if self._history.rows:
            complete_rows(self._log_dir, self._history.rows)

    def _page(self) -> None:
        if self._history.rows and self._write_page is not None and self._config.html_report_enabled:
            self._write_page(self._log_dir)

    def _report(self) -> None:
        if self._summary:
            print_report(self._log_dir, self._history.rows, list(self._shown), console=self._console)
        for place in self._loggers.places:
            self._say(place)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _keep_room(self) -> None:
        """Keep as much free as the end will need: twice the answers of the largest step, its row and the report."""
        assert self._rollouts is not None
        wanted = _RESERVED_BYTES + 2 * self._rollouts.largest_step
        if self._write_page is not None and self._config.html_report_enabled:
            wanted += _RESERVED_FOR_THE_PAGE
        with open_to_append(self._reserve) as file:
            while (missing := wanted - file.tell()) > 0:
                file.write(bytes(min(missing, _RESERVED_FOR_THE_PAGE)))

    @contextmanager
    def _room_given_back_on_failure(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.give_back_room()
            raise

    @contextmanager
    def _written(self) -> Generator[None]:
        """Raise FolderError for what fails."""
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
        """Time a phase of the step, or, where its name begins with `startup/`, a part of the start."""
        if name.startswith(STARTUP_PREFIX):
            with self.startup(name.removeprefix(STARTUP_PREFIX)):
                yield
            return
        if self._redoing:
            yield
            return
        self._progress.begin()
        with self.timer.phase(name), activity.at(name):
            yield

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
        row = {**metrics, **self.timer.end_step(), f"{TIMING_PREFIX}total": seconds}
        row |= {f"{TIMING_PREFIX}{STARTUP_PREFIX}{part}": s for part, s in self._startup.seconds.items()}
        self._startup.seconds.clear()
        if _TOKENS in row:
            row["performance/tokens_per_sec"] = row[_TOKENS] / seconds
        self.last_row = {"step": step, **row}
        with self._written():
            for sink in self._sinks:
                sink.log(step, row)
            self._keep_room()

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
