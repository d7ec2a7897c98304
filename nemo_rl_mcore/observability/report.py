"""The end of a run: a summary on the console, curves.png and samples.jsonl in the run's folder.

Everything is made from the rows of metrics.jsonl, so a report can be made again later, or during the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_mcore.observability.sinks import METRICS_FILE, TENSORBOARD_FOLDER

Row = Mapping[str, float]
"""The metrics of one step, with its number under "step"."""

CURVES_FILE = "curves.png"
SAMPLES_FILE = "samples.jsonl"

_SUMMARY_PREFIXES = ("validation/", "performance/", "timing/")
_CURVES = (
    *("train/reward", "validation/accuracy", "train/loss", "train/grad_norm", "train/entropy"),
    *("train/token_mult_prob_error", "performance/tokens_per_sec"),
)
_SHARED_CURVES: Mapping[str, tuple[str, ...]] = {
    "age of the tokens": ("async/age_mean", "async/age_max"),
    "groups under way": ("async/buffer_ready", "async/inflight"),
    "idle, share of a step": ("async/trainer_idle", "async/engine_idle"),
    "importance weights, responses": ("async/ess", "async/mixed_versions"),
}
"""Panels of several curves, by title: of a run whose groups are answered beside training."""
_CORRECTION = ("async/importance_ratio_max", "async/behaviour_kl")
_LOST_PREFIXES = ("async/requeued/", "async/dropped/")
_FIRST, _LAST = 5, 20


@dataclass(frozen=True)
class Sample:
    """One response, as a person wants to read it."""

    step: int
    prompt: str
    answer: str
    response: str
    reward: float
    finished: bool


class HistorySink:
    """A metric sink that keeps every row in memory, for the report."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the row."""
        self.rows.append({"step": step, **metrics})

    def close(self) -> None:
        """Nothing to release."""


def read_history(log_dir: Path) -> list[dict[str, float]]:
    """Read the rows of a run from its folder; null comes back as NaN.

    Raises:
        ValueError: the folder has no metrics.jsonl, or a line of it is not a row. A last line that was cut
            off, as in a run that is being written or was killed, is left out.

    """
    path = log_dir / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a run (its logger.log_dir)")
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [_row(line, f"{path}:{number}") for number, line in enumerate(complete.splitlines(), start=1)]


def write_report(
    log_dir: Path,
    rows: Sequence[Row],
    samples: Sequence[Sample] = (),
    *,
    console: Console,
    show_samples: int = 8,
) -> None:
    """Write the curves and the samples, then print the summary with the last samples and the files."""
    if not rows:
        console.print("No step was finished: nothing to report.")
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    files = [log_dir / METRICS_FILE]
    if samples:
        files.append(write_samples(samples, log_dir / SAMPLES_FILE))
    files.append(write_curves(rows, log_dir / CURVES_FILE))
    if (log_dir / TENSORBOARD_FOLDER).is_dir():
        files.append(log_dir / TENSORBOARD_FOLDER)
    console.print(summary_table(rows))
    if samples and show_samples:
        console.print(sample_table(samples[-show_samples:]))
    for file in files:
        console.print(f"{file}", markup=False, highlight=False, soft_wrap=True)


def summary_table(rows: Sequence[Row]) -> Table:
    """One line a metric: its mean over the first and the last steps, and its range, of the finite values."""
    title = f"{len(rows)} steps; means of the first {_FIRST} and the last {_LAST}"
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for heading in ("first", "last", "min", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in _summary_names(rows):
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        if values:
            cells = (_mean(values[:_FIRST]), _mean(values[-_LAST:]), min(values), max(values))
            table.add_row(escape(name), *(f"{cell:.4g}" for cell in cells))
    return table


def sample_table(samples: Sequence[Sample]) -> Table:
    """The samples as a table for the console."""
    table = Table(title="samples", title_justify="left")
    for heading in ("step", "prompt", "answer", "response", "ended", "reward"):
        table.add_column(heading)
    for sample in samples:
        texts = (escape(text) for text in (sample.prompt, sample.answer, sample.response))
        table.add_row(str(sample.step), *texts, "yes" if sample.finished else "no", f"{sample.reward:.3g}")
    return table


def write_samples(samples: Sequence[Sample], path: Path) -> Path:
    """Write one JSON object per sample."""
    lines = (json.dumps(asdict(sample), ensure_ascii=False) for sample in samples)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_curves(rows: Sequence[Row], path: Path) -> Path:
    """Draw the known metrics that the rows have over the steps, those that belong together in one panel."""
    # The object interface: pyplot would keep every figure alive and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curve_panels(rows)
    columns = min(3, max(1, len(panels)))
    lines = math.ceil(len(panels) / columns)
    figure: Any = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for position, (title, names) in enumerate(panels.items(), start=1):
        _draw(figure.add_subplot(lines, columns, position), rows, title, names)
    figure.savefig(path, dpi=110)
    return path


def curve_panels(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The metrics of each panel by its title; the first of the summary when the rows have none that is known."""
    logged = {name for row in rows for name in row}
    alone = {name: [name] for name in _CURVES if name in logged}
    shared = {title: [name for name in names if name in logged] for title, names in _SHARED_CURVES.items()}
    known = alone | {title: names for title, names in shared.items() if names}
    return known or {name: [name] for name in _summary_names(rows)[:6]}


def _draw(axes: Any, rows: Sequence[Row], title: str, names: Sequence[str]) -> None:
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) < 20 else None
        axes.plot(steps, values, linewidth=1.2, marker=marker, markersize=3, label=name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if title not in names:
        axes.legend(fontsize=8)


def _row(line: str, where: str) -> dict[str, float]:
    try:
        values: dict[str, Any] = json.loads(line)
        return {name: math.nan if value is None else float(value) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not a row of metrics: {error}") from error


def _summary_names(rows: Sequence[Row]) -> list[str]:
    """The metrics with a curve, then validation results and wall times; everything when none is known."""
    logged = dict.fromkeys(name for row in rows for name in row if name != "step")
    drawn = (*_CURVES, *(name for names in _SHARED_CURVES.values() for name in names), *_CORRECTION)
    known = [name for name in drawn if name in logged]
    prefixes = (*_LOST_PREFIXES, *_SUMMARY_PREFIXES)
    known += [
        name
        for name in logged
        if name.startswith(prefixes) and not name.endswith("_cpu") and name not in known
    ]
    return known or list(logged)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
