"""The pictures of the page, as figures of Plotly's JSON schema (https://plotly.com/javascript/reference/).

Colours and sizes are those of the page's own script; here is what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from nemo_rl_mcore.driver.observability.curves import DRAWN_METRICS, Row, curve_panels, points_of
from nemo_rl_mcore.driver.observability.series import is_sparse
from nemo_rl_mcore.driver.observability.startup import STARTUP_PREFIX
from nemo_rl_mcore.driver.observability.timing import TIMING_PREFIX
from nemo_rl_mcore.tools.report.run_data import RunData

Figure = dict[str, Any]

_MOST_POINTS = 2000
"""Of a curve; of longer ones the lowest and the highest of each stretch are drawn, so that no spike is lost."""
_PHASES = {
    "generation": "generation",
    "logprobs": "log-probabilities",
    "reference": "log-probabilities of the reference",
    "teacher": "log-probabilities of the teacher",
    "values": "values",
    "train": "training",
    "weight_sync": "refit",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "recovery": "recovery",
}
"""The phases in the order of a step, and what a reader calls them."""
_BESIDE = "async/trainer_idle"
"""A metric of runs with asynchronous rollouts: of their generation a step has what it waits for."""
_WAITING = "waiting for answers"
_REST = "the rest"
_SHOWN_SHARE = 0.002
"""Of the time of all steps; a phase with less counts as the rest."""
_DIGITS = 6
_AROUND_ZERO = 0.1
"""What the axis of a curve that stays 0 has to either side."""


def curve_groups(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the panels of all runs by their headings: {title, panels: [{metrics, title, note, figure}]}."""
    rows = [row for run in runs for row in run.rows]
    groups: dict[str, list[dict[str, Any]]] = {}
    for panel in curve_panels(rows) if rows else []:
        drawn = {"metrics": panel.metrics, "title": panel.heading, "note": panel.note}
        drawn["figure"] = _over_steps(runs, panel.metrics)
        groups.setdefault(panel.group, []).append(drawn)
    return [{"title": title, "panels": panels} for title, panels in groups.items()]


def other_metrics(runs: Sequence[RunData]) -> dict[str, Figure]:
    """Return a figure of each metric that has no panel, but for CPU seconds and the start's."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    left = [
        name
        for name in names
        if name not in ("step", *DRAWN_METRICS)
        and not name.endswith("_cpu")
        and not name.startswith(f"{TIMING_PREFIX}{STARTUP_PREFIX}")
    ]
    return {name: _over_steps(runs, [name]) for name in sorted(left)}


def waterfall(rows: Sequence[Row]) -> Figure | None:
    """Return the median step: its phases, one after the other, each with its seconds; None where none is known."""
    typical = {name: median(values) for name, values in _phase_seconds(rows).items()}
    typical = {name: seconds for name, seconds in typical.items() if seconds > 0}
    if not typical:
        return None
    starts = [0.0, *accumulate(typical.values())][:-1]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [*typical],
        "x": _rounded(typical.values()),
        "base": _rounded(starts),
        "text": [f"{seconds:.3g} s" for seconds in typical.values()],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "cliponaxis": False,
    }
    # Room for the number after the last bar.
    axis = {"title": {"text": "seconds"}, "range": [0, 1.15 * sum(typical.values())]}
    return _figure([bar], xaxis=axis, yaxis={"autorange": "reversed"})


def stacked_phases(rows: Sequence[Row]) -> Figure | None:
    """Return the seconds of each phase over the steps, one on top of the other."""
    spans = _phase_seconds(rows)
    if not spans:
        return None
    steps = [row["step"] for row in _timed(rows)]
    every = math.ceil(len(steps) / _MOST_POINTS)
    areas = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "phases",
            "name": name,
            "line": {"width": 0.5},
            "x": steps[::every],
            "y": _rounded(values[::every]),
        }
        for name, values in spans.items()
        if max(values) > 0
    ]
    return _figure(areas, xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "seconds"}})


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if math.isfinite(row.get(f"{TIMING_PREFIX}total", math.nan))]


def _phase_seconds(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the seconds of each phase in each timed step, and what is left of the step."""
    timed = _timed(rows)
    beside = {"generation": _WAITING} if any(_BESIDE in row for row in timed) else {}
    known = {f"{TIMING_PREFIX}{phase}": name for phase, name in (_PHASES | beside).items()}
    spans = {name: [_seconds(row, key) for row in timed] for key, name in known.items()}
    least = _SHOWN_SHARE * sum(row[f"{TIMING_PREFIX}total"] for row in timed)
    spans = {name: values for name, values in spans.items() if sum(values) > least}
    total = [row[f"{TIMING_PREFIX}total"] for row in timed]
    rest = [max(0.0, whole - sum(parts)) for whole, *parts in zip(total, *spans.values(), strict=True)]
    return spans | {_REST: rest} if timed else {}


def _seconds(row: Row, key: str) -> float:
    seconds = row.get(key, 0.0)
    return seconds if math.isfinite(seconds) else 0.0


def _over_steps(runs: Sequence[RunData], metrics: Iterable[str]) -> Figure:
    """Return the metrics over the steps of all runs, so that pictures that stand beside each other have one axis."""
    lines = _curves(runs, metrics)
    axes: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}, "range": [0, max(run.last_step for run in runs)]}
    }
    values = {value for line in lines for value in line["y"] if value is not None}
    if len(values) == 1:  # Plotly's own range is the value and 1 to either side: a learning rate looks like 0
        value = values.pop()
        half = abs(value) / 2 or _AROUND_ZERO
        axes["yaxis"] = {"range": [value - half, value + half]}
    return _figure(lines, **axes)


def _curves(runs: Sequence[RunData], metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Return a line for each metric of each run; `run` is its number, by which the page gives colours."""
    lines: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        for name in metrics:
            steps, values = points_of(run.rows, name)
            if not steps:
                continue
            dense = len(steps) >= 20 and not is_sparse(name, values, len(run.rows))
            steps, values = _thinned(steps, values)
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines" if dense else "lines+markers",
                    "run": number,
                    "name": name if len(runs) == 1 else f"{run.name}: {name}",
                    "x": steps,
                    "y": _rounded(values),
                }
            )
    return lines


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    width = math.ceil(2 * len(steps) / _MOST_POINTS)
    if width <= 2:
        return [*steps], [*values]
    kept: list[int] = []
    for start in range(0, len(steps), width):
        places = [
            place for place in range(start, min(start + width, len(steps))) if math.isfinite(values[place])
        ]
        if places:
            kept += sorted({min(places, key=values.__getitem__), max(places, key=values.__getitem__)})
    return [steps[place] for place in kept], [values[place] for place in kept]


def _rounded(values: Iterable[float]) -> list[float | None]:
    """As JSON takes them: what is not finite is a gap."""
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _figure(data: list[dict[str, Any]], **layout: Mapping[str, Any]) -> Figure:
    return {"data": data, "layout": layout}
