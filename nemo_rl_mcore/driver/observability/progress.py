"""A run's metrics in the terminal.

While it goes on that is a live panel on a terminal, and a plain line now and then elsewhere; at its end tables, which
are made from the rows of metrics.jsonl alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE, ROLLOUTS_FOLDER, Row, Sample
from nemo_rl_mcore.driver.output import open_console, visible

VALIDATION_PREFIX, TIMING_PREFIX = "validation/", "timing/"
STARTUP_PREFIX = "startup/"
"""Of the phases that are parts of the start."""
_REWARD, _STEP_TIME = "train/reward", f"{TIMING_PREFIX}total"
_DRAWN = {_REWARD: 1.0, _STEP_TIME: 0.0}
"""Metrics that are shown as a line over all steps so far, and where their scale ends at least."""
# Label and metric of what is shown, in this order; a metric that a run does not log is left out.
HEADLINE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward", _REWARD),
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
PANEL_METRICS = (
    ("reward spread", "train/reward_std"),
    ("clipped", "train/probs_ratio_clipfrac"),
    ("learning rate", "train/lr"),
    ("memory, GiB", "performance/peak_memory_gib"),
)
"""What is shown in the panel besides: a plain line has no room for it."""
# Label, metrics and text of what a run with asynchronous rollouts shows besides.
SIDE_BY_SIDE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("buffer", ("async/buffer_ready", "async/inflight"), "{:.0f} ready, {:.0f} in flight"),
    ("age", ("async/age_mean", "async/age_max"), "{:.2f}, at most {:.0f}"),
    ("idle", ("async/trainer_idle", "async/engine_idle"), "trainer {:.0%}, engines {:.0%}"),
)
_ZERO_WHERE_UNUSED = ("train/kl_penalty", "train/probs_ratio_clipfrac")
"""Metrics of a loss that are 0 all along where the recipe has nothing to penalise or to clip."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40

REPORT_FILE = "report.html"
_TOLD = (
    *(name for _, name in (*HEADLINE_METRICS, *PANEL_METRICS)),
    *(name for _, names, _ in SIDE_BY_SIDE for name in names),
    *("train/rewards_chosen_mean", "train/rewards_rejected_mean", "train/entropy"),
    *("train/token_mult_prob_error", "train/reward_std_within_groups", "train/max_gen_tokens_per_sample"),
    *("async/ess", "async/mixed_versions", "async/importance_ratio_max", "async/behaviour_kl"),
)
"""The metrics of the summary, in this order, before those with these beginnings."""
_SUMMARY_PREFIXES = ("async/requeued/", "async/dropped/", VALIDATION_PREFIX, "performance/", "timing/")
_STARTUP = "timing/startup/"
_FIRST, _LAST = 5, 20
_NUMBER_WIDTH, _TABLE_WIDTH = 9, 100


class Best(NamedTuple):
    step: int
    value: float


def best_of(name: str, points: Iterable[Best]) -> Best:
    """Return the best value of a metric, the earliest of equal ones: of validations the highest, but for losses."""
    highest = name.startswith(VALIDATION_PREFIX) and not name.endswith("loss")
    return max(points, key=lambda point: point.value if highest else -point.value)


def shown_metrics(*rows: Mapping[str, float]) -> frozenset[str]:
    """Return the metrics that are worth a line in what a person sees, as some row has them."""
    return frozenset(
        name for row in rows for name, value in row.items() if value or name not in _ZERO_WHERE_UNUSED
    )


class ProgressDisplay:
    """The metrics of a run as it goes on.

    On a terminal it redraws one panel, from `begin` on. Elsewhere it prints a line for the first step, every
    `plain_every`-th and the last, without control characters. `steps_before` are those that an earlier run has done.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        console: Console | None = None,
        plain_every: int = 10,
        steps_before: int = 0,
    ) -> None:
        self._title, self._plain_every, self._first = title, plain_every, steps_before + 1
        self._console = console or open_console()
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(30))
        clocks = (TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        # Steps may take minutes: what is left is told by all of this run's, not by those of the last seconds.
        self._bar = Progress(*columns, *clocks, console=self._console, speed_estimate_period=math.inf)
        task = self._bar.add_task("", start=False, total=total_steps, completed=steps_before)
        self._steps = self._bar.tasks[task]
        self._latest: dict[str, float] = {}
        self._series: dict[str, list[float]] = {name: [] for name in _DRAWN}
        self._best: dict[str, Best] = {}
        self._varies: frozenset[str] = frozenset()
        self._saved: int | None = None
        self._live: Live | None = None

    @property
    def begun(self) -> bool:
        return self._steps.started

    def begin(self) -> None:
        """Start the clock and, on a terminal, the live panel; idempotent."""
        if self.begun:
            return
        self._bar.start_task(self._steps.id)
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.begin()
        self.take(step, metrics)
        self._bar.update(self._steps.id, completed=step)
        if self._live is None and (step in (self._first, self._steps.total) or step % self._plain_every == 0):
            parts = [f"step {self._steps.completed}/{self._steps.total}"]
            parts += [f"{label} {text}" for label, text in self._told(HEADLINE_METRICS, metrics)]
            parts += [f"{phase} {seconds:.2f} s" for phase, seconds in _phases(metrics).items()]
            parts.append(f"elapsed {timedelta(seconds=int(self._steps.elapsed or 0))}")
            self._print("  ".join(parts))

    def saved(self, step: int) -> None:
        self._saved = step
        if self._live is None:
            self._print(f"checkpoint saved: step {self._saved}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        # Replaced, never changed: the live panel reads them from a thread of its own.
        self._latest = {**self._latest, **metrics}
        self._varies |= shown_metrics(metrics)
        found = {
            name: Best(step, metrics[name])
            for _, name in HEADLINE_METRICS
            if name.startswith(VALIDATION_PREFIX) and math.isfinite(metrics.get(name, math.nan))
        }
        self._best = self._best | {
            name: best_of(name, (self._best.get(name, new), new)) for name, new in found.items()
        }
        for name in _DRAWN:
            if name in metrics:
                self._series[name].append(metrics[name])

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _told(
        self, headlines: Sequence[tuple[str, str]], metrics: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        for label, name in headlines:
            if name not in metrics or name not in self._varies:
                continue
            value = self._latest[name]
            best = self._best.get(name, Best(0, value))
            more = f" (best {_number(best.value)} at step {best.step})" if best.value != value else ""
            yield label, _number(value) + more
        for label, names, template in SIDE_BY_SIDE:
            if all(name in metrics for name in names):
                yield label, template.format(*(metrics[name] for name in names))

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column()
        for label, text in self._told((*HEADLINE_METRICS, *PANEL_METRICS), self._latest):
            rows.add_row(label, text + (self._trend(_REWARD) if label == "reward" else ""))
        if phases := _phases(self._latest):
            seconds = "  ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
            rows.add_row("seconds", seconds + self._trend(_STEP_TIME))
        if self._saved is not None:
            rows.add_row("checkpoint", f"step {self._saved} is saved")
        return Panel(Group(self._bar, rows), title=self._title or None, title_align="left")

    def _trend(self, name: str) -> str:
        """Draw a series, from 0 to its highest value or `_DRAWN`, as means of at most 40 shares; NaN is a gap."""
        values = self._series[name]
        if not values or not self._console.encoding.startswith("utf"):
            return ""
        finite = [value for value in values if math.isfinite(value)]
        low, high = min([0.0, *finite]), max([_DRAWN[name], *finite])
        if len(values) > _SPARK_WIDTH:
            edges = [position * len(values) // _SPARK_WIDTH for position in range(_SPARK_WIDTH + 1)]
            shares = [[value for value in values[a:b] if not math.isnan(value)] for a, b in pairwise(edges)]
            values = [sum(share) / len(share) if share else math.nan for share in shares]
        scale = (len(_SPARK) - 1) / ((high - low) or 1.0)
        heights = [(min(max(value, low), high) - low) * scale for value in values]
        drawn = "".join(" " if math.isnan(height) else _SPARK[round(height)] for height in heights)
        return f"  {drawn}"


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Wall seconds per phase of a step; the CPU seconds, and those of the start, stay in the files."""
    return {
        phase: value
        for name, value in metrics.items()
        if name.startswith(TIMING_PREFIX)
        and not (phase := name.removeprefix(TIMING_PREFIX)).startswith(STARTUP_PREFIX)
        and not name.endswith("_cpu")
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_report(
    log_dir: Path, rows: Sequence[Row], samples: Sequence[Sample] = (), *, console: Console
) -> None:
    if not rows:
        console.print("No step was finished: nothing to report.")
        return
    for table in summary_tables(rows):
        if table.row_count:
            # A file, which has no width, is not to be cut off at that of a small terminal.
            console.print(table, width=None if console.is_terminal else _TABLE_WIDTH, crop=False)
    if samples:
        console.print(sample_table(samples))
    for name in (METRICS_FILE, ROLLOUTS_FOLDER, REPORT_FILE):
        if (file := log_dir / name).exists():
            console.print(f"{file}", markup=False, highlight=False, soft_wrap=True)


def summary_tables(rows: Sequence[Row]) -> tuple[Table, Table]:
    """Return a table of the metrics of every step, and one of those of some steps, such as a validation's.

    A metric has a line. The first table has its mean over the first and the last steps and its range, of finite values;
    the second one its first, best and last value: means over steps would say nothing of it.
    """
    # A validation before the first step has a row of its own, step 0.
    steps = sum(row["step"] > 0 for row in rows)
    dense, sparse = Table(title_justify="left"), Table(title_justify="left")
    dense.title = f"{steps} steps; means of the first {_FIRST} and the last {_LAST}"
    sparse.title = "of some steps; the first, the best and the last value"
    columns = (dense, ("first", "last", "min", "max")), (sparse, ("first", "best", "at step", "last"))
    for table, headings in columns:
        table.add_column("metric", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True, min_width=_NUMBER_WIDTH)
    shown = shown_metrics(*rows)
    logged = dict.fromkeys(name for row in rows for name in row if name in shown and name != "step")
    known = [name for name in _TOLD if name in logged]
    known += [
        name
        for name in logged
        if name.startswith(_SUMMARY_PREFIXES)
        and not (name.endswith("_cpu") or name.startswith(_STARTUP) or name in known)
    ]
    for name in known or logged:  # everything where nothing is known
        points = [Best(int(row["step"]), row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
        values = [value for _, value in points]
        if not points:
            continue
        if name.startswith(VALIDATION_PREFIX) or 2 * len(points) < len(rows):
            best = best_of(name, points)
            first, highest, last = (f"{value:.4g}" for value in (values[0], best.value, values[-1]))
            sparse.add_row(escape(name), first, highest, str(best.step), last)
        else:
            ends = (sum(some) / len(some) for some in (values[:_FIRST], values[-_LAST:]))
            cells = (f"{value:.4g}" for value in (*ends, min(values), max(values)))
            dense.add_row(escape(name), *cells)
    return dense, sparse


def sample_table(samples: Sequence[Sample]) -> Table:
    table = Table(title="samples", title_justify="left")
    for heading in ("step", "prompt", "answer", "response", "ended", "reward"):
        table.add_column(heading)
    for sample in samples:
        # Spelt out here, too: whichever console it is printed on.
        texts = (escape(visible(text)) for text in (sample.prompt, sample.answer, sample.response))
        ended = "no" if sample.truncated else "yes"
        table.add_row(str(sample.step), *texts, ended, f"{sample.reward:.3g}")
    return table
