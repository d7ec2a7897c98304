"""Read the metrics of a run, and print a summary of them at its end.

Everything is made from the rows of metrics.jsonl, so a report can be made again later, or during the run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_mcore.driver.observability.curves import DRAWN_METRICS, Row
from nemo_rl_mcore.driver.observability.rollouts import ROLLOUTS_FOLDER, Sample
from nemo_rl_mcore.driver.observability.series import Best, best_of, is_sparse, shown_in
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.errors import RefusedError

REPORT_FILE = "report.html"

_SUMMARY_PREFIXES = ("validation/", "performance/", "timing/")
_STARTUP = "timing/startup/"
_CORRECTION = ("async/importance_ratio_max", "async/behaviour_kl")
_LOST_PREFIXES = ("async/requeued/", "async/dropped/")
_FIRST, _LAST = 5, 20
_NUMBER_WIDTH, _TABLE_WIDTH = 9, 100


class HistorySink:
    """A metric sink that keeps every row in memory, for the report."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the row."""
        self.rows.append({"step": step, **metrics})

    def close(self) -> None:
        """Nothing to release."""


def read_history(
    log_dir: Path, damaged: Callable[[ValueError], object] | None = None
) -> list[dict[str, float]]:
    """Read the rows of a run from its folder; null comes back as NaN.

    damaged: is told of each line that is not a row, which is then left out.

    Raises:
        ValueError: the folder has no metrics.jsonl, or a line of it is not a row and there is no `damaged`. A last
            line that was cut off, as in a run that is being written or was killed, is left out.

    """
    path = log_dir / METRICS_FILE
    if not path.is_file():
        raise RefusedError(
            f"{path} does not exist; give the folder of a run (its logger.log_dir)", code="no-run"
        )
    *complete, _ = path.read_bytes().split(b"\n")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(_row(line, f"{path}:{number}"))
        except ValueError as error:
            if damaged is None:
                raise
            damaged(error)
    return rows


def print_report(
    log_dir: Path, rows: Sequence[Row], samples: Sequence[Sample] = (), *, console: Console
) -> None:
    """Print the summary, these samples and the files of the run."""
    if not rows:
        console.print("No step was finished: nothing to report.")
        return
    for table in (summary_table(rows), sparse_table(rows)):
        if table.row_count:
            # A file, which has no width, is not to be cut off at that of a small terminal.
            console.print(table, width=None if console.is_terminal else _TABLE_WIDTH, crop=False)
    if samples:
        console.print(sample_table(samples))
    for name in (METRICS_FILE, ROLLOUTS_FOLDER, REPORT_FILE):
        if (file := log_dir / name).exists():
            console.print(f"{file}", markup=False, highlight=False, soft_wrap=True)


def summary_table(rows: Sequence[Row]) -> Table:
    """One line a metric of every step: its mean over the first and the last steps, and its range, of finite values."""
    # A validation before the first step has a row of its own, step 0.
    steps = sum(row["step"] > 0 for row in rows)
    title = f"{steps} steps; means of the first {_FIRST} and the last {_LAST}"
    table = _table(title, "first", "last", "min", "max")
    for name, points in _summarised(rows).items():
        values = [point.value for point in points]
        if not is_sparse(name, values, len(rows)):
            cells = (_mean(values[:_FIRST]), _mean(values[-_LAST:]), min(values), max(values))
            table.add_row(escape(name), *(f"{cell:.4g}" for cell in cells))
    return table


def sparse_table(rows: Sequence[Row]) -> Table:
    """One line a metric of some steps, such as a validation's: its first, best and last value, not means of them."""
    table = _table(
        "of some steps; the first, the best and the last value", "first", "best", "at step", "last"
    )
    for name, points in _summarised(rows).items():
        if is_sparse(name, [point.value for point in points], len(rows)):
            best = points[0]
            for point in points[1:]:
                best = best_of(name, best, point)
            first, highest, last = (f"{point.value:.4g}" for point in (points[0], best, points[-1]))
            table.add_row(escape(name), first, highest, str(best.step), last)
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=_NUMBER_WIDTH)
    return table


def _summarised(rows: Sequence[Row]) -> dict[str, list[Best]]:
    """Return the finite values of each metric of the summary, with their steps."""
    found = {
        name: [Best(int(row["step"]), row[name]) for row in rows if name in row and math.isfinite(row[name])]
        for name in _summary_names(rows)
    }
    return {name: points for name, points in found.items() if points}


def sample_table(samples: Sequence[Sample]) -> Table:
    """Return the samples as a table for the console."""
    table = Table(title="samples", title_justify="left")
    for heading in ("step", "prompt", "answer", "response", "ended", "reward"):
        table.add_column(heading)
    for sample in samples:
        # Spelt out here, too: whichever console it is printed on.
        texts = (escape(visible(text)) for text in (sample.prompt, sample.answer, sample.response))
        ended = "no" if sample.truncated else "yes"
        table.add_row(str(sample.step), *texts, ended, f"{sample.reward:.3g}")
    return table


def _row(line: bytes, where: str) -> dict[str, float]:
    try:
        values: dict[str, Any] = json.loads(line)
        if not math.isfinite(values.get("step", math.nan)):
            raise ValueError("its step is no number")
        return {
            sys.intern(name): math.nan if value is None else float(value) for name, value in values.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RefusedError(f"{where} is not a row of metrics: {error}", code="broken-row") from error


def _summary_names(rows: Sequence[Row]) -> list[str]:
    """Return the metrics with a curve, then validation results and wall times; everything when none is known."""
    shown = shown_in(rows)
    logged = dict.fromkeys(name for row in rows for name in row if name in shown and name != "step")
    drawn = (*DRAWN_METRICS, *_CORRECTION)
    known = [name for name in drawn if name in logged]
    prefixes = (*_LOST_PREFIXES, *_SUMMARY_PREFIXES)
    known += [
        name
        for name in logged
        if name.startswith(prefixes)
        and not (name.endswith("_cpu") or name.startswith(_STARTUP) or name in known)
    ]
    return known or list(logged)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
