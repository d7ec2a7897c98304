"""What a person is shown of a run's metrics: which belong together, which is best, and the tables at its end.

Everything is made from the rows of metrics.jsonl, so a report can be made again later, or during the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_mcore.driver.observability.progress import (
    HEADLINE_METRICS,
    PANEL_METRICS,
    SIDE_BY_SIDE,
    VALIDATION_PREFIX,
    Best,
    best_of,
    shown_metrics,
)
from nemo_rl_mcore.driver.observability.rollouts import ROLLOUTS_FOLDER, Sample
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE, Row
from nemo_rl_mcore.driver.output import visible

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


def print_report(
    log_dir: Path, rows: Sequence[Row], samples: Sequence[Sample] = (), *, console: Console
) -> None:
    """Print the summary, these samples and the files of the run."""
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
    dense = _table(
        f"{steps} steps; means of the first {_FIRST} and the last {_LAST}", "first", "last", "min", "max"
    )
    sparse = _table(
        "of some steps; the first, the best and the last value", "first", "best", "at step", "last"
    )
    for name in _summary_names(rows):
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


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=_NUMBER_WIDTH)
    return table


def _summary_names(rows: Sequence[Row]) -> list[str]:
    """Return the metrics that are known, then validation results and wall times; everything when none is known."""
    shown = shown_metrics(*rows)
    logged = dict.fromkeys(name for row in rows for name in row if name in shown and name != "step")
    known = [name for name in _TOLD if name in logged]
    known += [
        name
        for name in logged
        if name.startswith(_SUMMARY_PREFIXES)
        and not (name.endswith("_cpu") or name.startswith(_STARTUP) or name in known)
    ]
    return known or list(logged)


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
