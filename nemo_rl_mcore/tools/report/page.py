"""The page: what is known of the runs as JSON, with the script that draws it, in one file that asks for no other."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_rl_mcore.driver.observability.progress import REPORT_FILE, Best, best_of
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.events import Aborted, Cancelled, Failed, Lost, Started
from nemo_rl_mcore.driver.run_folder import replacing, shown_value
from nemo_rl_mcore.tools.report.findings import Hint, findings_of, finite_points
from nemo_rl_mcore.tools.report.run_data import (
    WINDOW,
    RunData,
    columns_of,
    mean,
    read_run,
    steps_shown,
    told_apart,
)

_PARTS = files(__package__) / "web"
_SCRIPTS = ("script.js", "curves.js", "rollouts.js", "start.js")


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
_COMPARISON_FILE = "comparison.html"


def run_report(folders: Sequence[str], output: str | None) -> int:
    """Write the page and tell its name; 2 where a folder is that of no run, or the file cannot be written."""
    once: dict[Path, Path] = {}
    for folder in map(Path, folders):
        once.setdefault(folder.resolve(), folder)
    paths = [*once.values()]
    default = paths[0] / REPORT_FILE if len(paths) == 1 else Path(_COMPARISON_FILE)
    try:
        runs = told_apart([read_run(path) for path in paths])
        page = write_page(runs, Path(output) if output else default)
    except ValueError as error:
        write_line(sys.stderr, f"report: {error}")
        return 2
    except OSError as error:
        write_line(sys.stderr, f"report: {error.filename or output or default}: {error.strerror}")
        return 2
    write_line(sys.stdout, str(page))
    return 0


def page_of_run(folder: Path) -> None:
    """Write the page of a run that ends; what fails is told, and changes nothing of how the run ends."""
    try:
        write_page([read_run(folder)], folder / REPORT_FILE)
    except Exception as error:  # noqa: BLE001 a page that cannot be made is no reason to fail what was trained
        write_line(sys.stderr, f"{folder / REPORT_FILE} was not written: {type(error).__name__}: {error}")


def write_page(runs: Sequence[RunData], path: Path) -> Path:
    """Write the page of these runs; it is whole or not there. Raises OSError."""
    page = _page(runs).encode(errors="backslashreplace")
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        error.filename = str(path)
        raise
    return path


def _page(runs: Sequence[RunData]) -> str:
    parts = {
        "title": " and ".join(run.name for run in runs).translate(_HTML),
        "style": _part("style.css"),
        "plotly": (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"),
        "data": _json(content_of(runs)),
        "script": "\n".join(map(_part, _SCRIPTS)),
    }
    # One pass over the template, so that nothing that was put in is taken for a place.
    pieces = _part("page.html").split("{{")
    return pieces[0] + "".join(
        parts[name] + rest for piece in pieces[1:] for name, _, rest in [piece.partition("}}")]
    )


def content_of(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return what the script shows, as JSON's values."""
    return {
        "version": version("nemo-rl-mcore"),
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "runs": [_run(run) for run in runs],
        "differences": differences(runs) if len(runs) > 1 else [],
    }


def _run(run: RunData) -> dict[str, Any]:
    steps, unread = steps_shown(run.folder)
    findings = [*(Hint("warning", line) for line in unread), *findings_of(run)]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "summary": summary(run),
        "findings": [vars(finding) for finding in findings],
        "columns": columns_of(run.rows),
        "lastStep": run.last_step,
        "steps": steps,
        "evaluations": run.evaluations,
        "faults": faults(run),
        "recipe": run.recipe_text,
    }


def _part(name: str) -> str:
    return (_PARTS / name).read_text("utf-8")


_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
_JSON_IN_HTML = str.maketrans({"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def _json(value: object) -> str:
    """As it may stand in a script element: no text of an answer ends it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(
        _JSON_IN_HTML
    )


def summary(run: RunData) -> list[list[str]]:
    """Return a name and a text for each line of what a run came to."""
    lines: list[list[str]] = []
    if run.algorithm is not None:
        lines.append(["algorithm", run.algorithm])
    if run.rows:
        of = f" of {run.total_steps}" if run.total_steps is not None else ""
        lines.append(["steps", f"{run.last_step}{of}"])
        seconds = sum(value for _, value in finite_points(run.rows, "timing/total"))
        lines.append(["time in steps", str(timedelta(seconds=round(seconds)))])
    if tokens := sum(value for _, value in finite_points(run.rows, "train/total_num_tokens")):
        lines.append(["tokens", f"{tokens:,.0f}"])
    for name in (*_OF_STEPS, *_OF_VALIDATIONS):
        points = [Best(int(step), value) for step, value in finite_points(run.rows, name)]
        values = [value for _, value in points]
        if name in _OF_STEPS and points:
            ends = mean(values[:WINDOW]), mean(values[-WINDOW:])
            lines.append([name, f"{ends[0]:.4g} at first, {ends[1]:.4g} at last"])
        elif points:
            best = best_of(name, points)
            told = f"{values[0]:.4g} at first, best {best.value:.4g} at step {best.step}, {values[-1]:.4g} at last"
            lines.append([name, told])
    return lines


def faults(run: RunData) -> list[list[str]]:
    """Return a place in the run, and what happened there that it survived."""
    return [*_of_the_metrics(run), *_of_the_events(run)]


def _of_the_metrics(run: RunData) -> Iterator[list[str]]:
    for name, what in _COUNTED.items():
        before = 0.0
        for step, value in finite_points(run.rows, name):
            if value > before:
                yield [f"step {int(step)}", f"{value - before:.0f} {what}"]
            before = value


def _of_the_events(run: RunData) -> Iterator[list[str]]:
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


def differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return the keys whose values differ between the recipes of the runs, with the value of each."""
    keys = [run.keys for run in runs]
    return [
        [path, *(shown_value(of_run.get(path, "")) for of_run in keys)]
        for path in dict.fromkeys(path for of_run in keys for path in of_run)
        if any(of_run.get(path, "") != keys[0].get(path, "") for of_run in keys[1:])
    ]
