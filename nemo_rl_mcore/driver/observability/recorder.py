"""A run's recorder: timed phases, sinks, a line of metrics per step on the terminal, and the final report."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.observability.loggers import Loggers, RunFacts
from nemo_rl_mcore.driver.observability.sinks import (
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    JsonlSink,
    RolloutSink,
    Row,
    Sample,
    complete_rows,
    read_history,
)
from nemo_rl_mcore.driver.output import open_console, print_plain, visible, write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import FolderError, folder_error

VALIDATION_PREFIX, TIMING_PREFIX = "validation/", "timing/"
STARTUP_PREFIX = "startup/"
"""Prefix of phases that are parts of the start."""
# Labels and metrics in display order; metrics that a run does not log are omitted.
HEADLINE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward", "train/reward"),
    ("accuracy", "validation/accuracy"),
    ("preference accuracy", "train/preference_accuracy"),
    ("held-out preference accuracy", "validation/preference_accuracy"),
    ("margin", "train/rewards_margin_mean"),
    ("loss", "train/loss"),
    ("held-out loss", "validation/loss"),
    ("gradient norm", "train/grad_norm"),
    ("response length", "train/mean_gen_tokens_per_sample"),
    ("truncated", "train/truncation_rate"),
    ("KL", "train/kl_penalty"),
    ("tokens/s", "performance/tokens_per_sec"),
)
# Labels, metrics and texts for runs with asynchronous rollouts.
SIDE_BY_SIDE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("buffer", ("async/buffer_ready", "async/inflight"), "{:.0f} ready, {:.0f} in flight"),
    ("age", ("async/age_mean", "async/age_max"), "{:.2f}, at most {:.0f}"),
    ("idle", ("async/trainer_idle", "async/engine_idle"), "trainer {:.0%}, engines {:.0%}"),
)
_ZERO_WHERE_UNUSED = "train/kl_penalty"
"""Always 0, and then omitted, if the recipe penalises nothing."""
REPORT_FILE = "report.html"


class Best(NamedTuple):
    step: int
    value: float


def best_of(name: str, points: Iterable[Best]) -> Best:
    """Return a metric's best value, the earliest of equal ones: the highest for validation metrics except losses."""
    highest = name.startswith(VALIDATION_PREFIX) and not name.endswith("loss")
    return max(points, key=lambda point: point.value if highest else -point.value)


class ProgressDisplay:
    """Prints a line per step on a terminal; elsewhere for the first, the last and every `plain_every`-th step.

    steps_before: the number of steps in an earlier run.
    """

    def __init__(
        self, total_steps: int, *, console: Console, plain_every: int = 10, steps_before: int = 0
    ) -> None:
        self._total, self._before, self._console = total_steps, steps_before, console
        self._every = 1 if console.is_terminal else plain_every
        self._best: dict[str, Best] = {}
        self._penalised = False

    def log(self, step: int, metrics: Mapping[str, float], elapsed_s: float = 0.0) -> None:
        self.take(step, metrics)
        if step not in (self._before + 1, self._total) and step % self._every:
            return
        parts = [f"step {step}/{self._total}"]
        for label, name in HEADLINE_METRICS:
            if name in metrics and (self._penalised or name != _ZERO_WHERE_UNUSED):
                value = metrics[name]
                best = self._best.get(name, Best(0, value))
                more = f" (best {_number(best.value)} at step {best.step})" if best.value != value else ""
                parts.append(f"{label} {_number(value)}{more}")
        for label, names, template in SIDE_BY_SIDE:
            if all(name in metrics for name in names):
                parts.append(f"{label} {template.format(*(metrics[name] for name in names))}")
        for name, value in metrics.items():  # CPU seconds and startup times go only to the files
            phase = name.removeprefix(TIMING_PREFIX)
            if phase != name and not (phase.startswith(STARTUP_PREFIX) or phase.endswith("_cpu")):
                parts.append(f"{phase} {value:.2f} s")
        parts.append(f"elapsed {timedelta(seconds=int(elapsed_s))}")
        if self._console.is_terminal and step - self._before > 0:
            left_s = elapsed_s / (step - self._before) * (self._total - step)
            parts.append(f"left {timedelta(seconds=int(left_s))}")
        print_plain(self._console, "  ".join(parts))

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Include an unprinted step in the best values."""
        self._penalised |= bool(metrics.get(_ZERO_WHERE_UNUSED, 0.0))
        for _, name in HEADLINE_METRICS:
            if name.startswith(VALIDATION_PREFIX) and math.isfinite(metrics.get(name, math.nan)):
                new = Best(step, metrics[name])
                self._best[name] = best_of(name, (self._best.get(name, new), new))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_report(
    log_dir: Path, rows: Sequence[Row], samples: Collection[Sample] = (), *, console: Console
) -> None:
    """Print some of the run's answers and its files' paths."""
    if not rows:
        console.print("No step was finished: nothing to report.")
        return
    if samples:
        console.print(sample_table(samples))
    for name in (METRICS_FILE, ROLLOUTS_FOLDER, REPORT_FILE):
        if (file := log_dir / name).exists():
            print_plain(console, f"{file}")


def sample_table(samples: Iterable[Sample]) -> Table:
    table = Table(title="samples", title_justify="left")
    for heading in ("step", "prompt", "answer", "response", "ended", "reward"):
        table.add_column(heading)
    for sample in samples:
        # Spell it out here as well, since any console may print it.
        texts = (escape(visible(text)) for text in (sample.prompt, sample.answer, sample.response))
        ended = "no" if sample.truncated else "yes"
        table.add_row(str(sample.step), *texts, ended, f"{sample.reward:.3g}")
    return table


_KEY = "logger.log_dir"
_TOKENS = "train/total_num_tokens"
_TOLD_AS = {"restore": "restoring the checkpoint", "weights": "sending the weights to the engines"}
_TOLD_AT_ITS_END = "weights"
"""A part that is printed at its end, since it includes the engines' start, which is printed first."""


@dataclass
class Startup:
    """Times the parts of a run's start; each second counts only in the innermost part."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _unfinished: str = ""
    _inner_s: float = 0.0

    @contextmanager
    def part(self, name: str, told_as: str = "") -> Generator[dict[str, float]]:
        """Time the block; yields a dict to which the block may add its pieces' seconds, by name."""
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

    `startup` prints the parts of the start, even before the block; the first step begins after the last part, and the
    first row has the parts' seconds as `timing/startup/<part>`. Each step gets `timing/<phase>`, `timing/total` (wall
    seconds since the previous step) and `performance/tokens_per_sec`. With `run.resumed_step`, the folder's metrics are
    continued. An error in the block does not prevent the report. write_page: writes a page about the folder. summary:
    True to print samples and paths at the end.
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
        for sample in samples:
            self._samples.append(sample)
            if sample.sample_index == 0:
                self._shown.append(sample)
