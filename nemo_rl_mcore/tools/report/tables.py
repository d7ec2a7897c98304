"""The tables of the page: what a run came to, its evaluations, the faults that it survived, where recipes differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any

from nemo_rl_mcore.driver.observability.curves import finite_points, finite_values
from nemo_rl_mcore.driver.observability.series import Best, best_of
from nemo_rl_mcore.driver.rollouts.events import Aborted, Cancelled, Failed, Lost, Started
from nemo_rl_mcore.driver.saved_run import shown_value
from nemo_rl_mcore.tools.report.run_data import WINDOW, RunData, mean

_COUNTED = {
    "recovery/retries": "parts of a step were tried again",
    "recovery/restarts": "times the run went back to a checkpoint with new ranks",
    "recovery/redone_steps": "steps were trained again",
    "async/engine_restarts": "engines restarted",
}
"""Metrics that count from the start of a run on."""
_OF_VALIDATIONS = (
    "validation/reward",
    "validation/accuracy",
    "validation/preference_accuracy",
    "validation/loss",
)
_OF_STEPS = ("train/reward", "train/loss")
Row = list[str]


def summary(run: RunData) -> list[Row]:
    """Return a name and a text for each line of what a run came to."""
    lines: list[Row] = []
    if run.algorithm is not None:
        lines.append(["algorithm", run.algorithm])
    if run.rows:
        of = f" of {run.total_steps}" if run.total_steps is not None else ""
        lines.append(["steps", f"{run.last_step}{of}"])
        seconds = sum(finite_values(run.rows, "timing/total"))
        lines.append(["time in steps", str(timedelta(seconds=round(seconds)))])
    if tokens := sum(finite_values(run.rows, "train/total_num_tokens")):
        lines.append(["tokens", f"{tokens:,.0f}"])
    lines += [[name, text] for name in _OF_STEPS if (text := _first_and_last(run, name))]
    lines += [[name, text] for name in _OF_VALIDATIONS if (text := _first_best_last(run, name))]
    return lines


def _first_and_last(run: RunData, name: str) -> str:
    """Return the means over the first and the last steps."""
    values = finite_values(run.rows, name)
    return f"{mean(values[:WINDOW]):.4g} at first, {mean(values[-WINDOW:]):.4g} at last" if values else ""


def _first_best_last(run: RunData, name: str) -> str:
    points = [Best(int(step), value) for step, value in finite_points(run.rows, name)]
    if not points:
        return ""
    best = reduce(partial(best_of, name), points)
    return f"{points[0].value:.4g} at first, best {best.value:.4g} at step {best.step}, {points[-1].value:.4g} at last"


def evaluations(run: RunData) -> list[dict[str, Any]]:
    """Return a table for each evaluation: {title, header, rows}; a value with its standard error."""
    return [
        {"title": folder, "header": ["set", "prompts", "samples", *names], "rows": rows}
        for folder, results in run.evaluations.items()
        for names in [_metric_names(results)]
        if (
            rows := [
                _result(name, result, names) for name, result in results.items() if isinstance(result, dict)
            ]
        )
    ]


def _metric_names(results: Any) -> list[str]:
    return list(dict.fromkeys(name for result in results.values() for name in result.get("metrics", {})))


def _result(name: str, result: Any, names: Sequence[str]) -> Row:
    cells = [name, str(result.get("prompts", "")), str(result.get("samples", ""))]
    for metric in names:
        estimate = result.get("metrics", {}).get(metric)
        cells.append("" if estimate is None else _estimate(estimate))
    return cells


def _estimate(estimate: Any) -> str:
    error = estimate.get("stderr")
    return f"{estimate['mean']:.4g}" + ("" if error is None else f" ± {error:.2g}")


def faults(run: RunData) -> list[Row]:
    """Return a place in the run, and what happened there that it survived."""
    return [*_of_the_metrics(run), *_of_the_events(run)]


def _of_the_metrics(run: RunData) -> Iterator[Row]:
    for name, what in _COUNTED.items():
        before = 0.0
        for step, value in finite_points(run.rows, name):
            if value > before:
                yield [f"step {int(step)}", f"{value - before:.0f} {what}"]
            before = value


def _of_the_events(run: RunData) -> Iterator[Row]:
    reasons: Counter[tuple[str, str]] = Counter()
    for event in run.events:
        match event:
            case Started(incarnation=number, version=version) if number:
                yield [f"step {version}", "the driver started again and went on from here"]
            case Lost(step=step, reason=reason):
                yield [
                    f"step {step}",
                    f"ranks died while the optimizer stepped; the step was done again: {reason}",
                ]
            case Aborted(step=step, reason=reason):
                yield [f"step {step}", f"the step was given up and done again: {reason}"]
            case Failed(reason=reason, dropped=dropped):
                reasons["given up" if dropped else "asked again after a failure", reason] += 1
            case Cancelled(reason=reason):
                reasons["asked again", reason] += 1
            case _:
                pass
    for (what, reason), count in reasons.most_common():
        yield ["all steps", f"{count} prompts were {what}: {reason}"]


def differences(runs: Sequence[RunData]) -> list[Row]:
    """Return the keys whose values differ between the recipes of the runs, with the value of each."""
    keys = [run.keys for run in runs]
    return [
        [path, *(shown_value(of_run.get(path, "")) for of_run in keys)]
        for path in dict.fromkeys(path for of_run in keys for path in of_run)
        if any(of_run.get(path, "") != keys[0].get(path, "") for of_run in keys[1:])
    ]
