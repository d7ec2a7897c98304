"""The page: the runs' data as JSON and the script that draws it, in one file."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.driver.observability.recorder import REPORT_FILE, Best, best_of
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE, Row
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.events import Aborted, Cancelled, Failed, Lost, Started
from nemo_rl_mcore.driver.run_folder import replacing, shown_value
from nemo_rl_mcore.tools.report.run_data import WINDOW, RunData, columns_of, mean, read_run, steps_shown

_PARTS = files(__package__) / "web"


_COUNTED = {
    "recovery/retries": "parts of a step were retried",
    "recovery/restarts": "restarts from a checkpoint with new ranks",
    "recovery/redone_steps": "steps were repeated",
    "async/engine_restarts": "engines restarted",
}
"""Metrics that count from the run's start."""
_OF_VALIDATIONS = (
    "validation/reward",
    "validation/accuracy",
    "validation/preference_accuracy",
    "validation/loss",
)
_OF_STEPS = ("train/reward", "train/loss")


def run_report(folders: Sequence[str], output: str | None) -> int:
    """Write the page and print its path; return 2 if a folder holds no run, or the file cannot be written."""
    once: dict[Path, Path] = {}
    for folder in map(Path, folders):
        once.setdefault(folder.resolve(), folder)
    paths = [*once.values()]
    default = paths[0] / REPORT_FILE if len(paths) == 1 else Path("comparison.html")
    try:
        runs = [read_run(path) for path in paths]
        # Runs whose folders share a name are shown with their whole path.
        names = Counter(run.name for run in runs)
        runs = [replace(run, called=str(run.folder)) if names[run.name] > 1 else run for run in runs]
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
    """Write the page at a run's end; a failure is printed and does not affect the run."""
    try:
        write_page([read_run(folder)], folder / REPORT_FILE)
    except Exception as error:  # noqa: BLE001 a run must not fail because of its page
        write_line(sys.stderr, f"{folder / REPORT_FILE} was not written: {type(error).__name__}: {error}")


_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
_JSON_IN_HTML = str.maketrans({"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def write_page(runs: Sequence[RunData], path: Path) -> Path:
    """Write the runs' page atomically; raises OSError."""
    whole = {
        "version": version("nemo-rl-mcore"),
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "runs": [content_of(run) for run in runs],
        "differences": differences(runs) if len(runs) > 1 else [],
    }
    data = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    scripts = ("script", "curves", "rollouts", "start")
    parts = {
        "title": " and ".join(run.name for run in runs).translate(_HTML),
        "style": (_PARTS / "style.css").read_text("utf-8"),
        "plotly": (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"),
        "data": data.translate(_JSON_IN_HTML),  # no answer's text can end the script element
        "script": "\n".join((_PARTS / f"{name}.js").read_text("utf-8") for name in scripts),
    }
    # A single pass, so that {{ in the data is not taken for a placeholder.
    page, *pieces = (_PARTS / "page.html").read_text("utf-8").split("{{")
    for piece in pieces:
        name, _, between = piece.partition("}}")
        page += parts[name] + between
    try:
        with replacing(path) as file:
            file.write(page.encode(errors="backslashreplace"))
    except OSError as error:
        error.filename = str(path)
        raise
    return path


def content_of(run: RunData) -> dict[str, Any]:
    """Return a run's data for the script."""
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
        "recipe": "" if run.recipe is None else yaml.safe_dump(run.recipe, sort_keys=False),
    }


def summary(run: RunData) -> list[list[str]]:
    """Return a run's results as pairs of name and text."""
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
            lines.append([name, f"{ends[0]:.4g} at first, {ends[1]:.4g} at the end"])
        elif points:
            best = best_of(name, points)
            best_text = f"best {best.value:.4g} at step {best.step}"
            lines.append([name, f"{values[0]:.4g} at first, {best_text}, {values[-1]:.4g} at the end"])
    return lines


def faults(run: RunData) -> list[list[str]]:
    """Return the faults that the run survived, as pairs of place and text."""
    reasons: Counter[tuple[str, str]] = Counter()
    found = [
        [f"step {int(step)}", f"{value - before:.0f} {what}"]
        for name, what in _COUNTED.items()
        for (_, before), (step, value) in pairwise([(0.0, 0.0), *finite_points(run.rows, name)])
        if value > before
    ]
    for event in run.events:
        match event:
            case Started(incarnation=number, version=version) if number:
                found.append([f"step {version}", "the driver restarted and continued from here"])
            case Lost(step=step, reason=reason):
                text = f"ranks died during the optimizer step; the step was repeated: {reason}"
                found.append([f"step {step}", text])
            case Aborted(step=step, reason=reason):
                found.append([f"step {step}", f"the step was aborted and repeated: {reason}"])
            case Failed(reason=reason, dropped=dropped):
                reasons["given up" if dropped else "repeated after a failure", reason] += 1
            case Cancelled(reason=reason):
                reasons["repeated", reason] += 1
            case _:
                pass
    for (what, reason), count in reasons.most_common():
        found.append(["all steps", f"{count} prompts were {what}: {reason}"])
    return found


def differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return the keys that differ between the runs' recipes, each with all runs' values."""
    keys = [run.keys for run in runs]
    return [
        [path, *(shown_value(of_run.get(path, "")) for of_run in keys)]
        for path in dict.fromkeys(path for of_run in keys for path in of_run)
        if any(of_run.get(path, "") != keys[0].get(path, "") for of_run in keys[1:])
    ]


# Hints on where to look first; a rule needs its metric to be logged.

# Relative to its first value, since nats depend on vocabulary and task. A tenth of 1 nat is a choice of two at 98 to 2.
_COLLAPSED_ENTROPY = 0.1
# Relative to the highest reward of any answer. If nearly all answers reach it, entropy and spread rightly fall.
_LEARNT = 0.9
# Mean of exp|engine - training| over tokens, 1 if they agree: 5 % per token is up to a factor of 130 over 100 tokens.
_LARGE_MISMATCH = 1.05
# Effective sample size relative to the tokens: below a half, most samples hardly count.
_SMALL_SAMPLE = 0.5
# Share of the answers: at a quarter, a group of four has on average one that is scored for its length.
_MANY_TRUNCATED = 0.25
# A reward has fallen if it is below its best by more than these shares of its range and of its best.
_FALL, _NOISE = 0.2, 0.1


@dataclass(frozen=True)
class Hint:
    """Something to look at; panel: the metric whose plot shows it."""

    text: str
    panel: str = ""


def finite_points(rows: Iterable[Row], name: str) -> list[tuple[float, float]]:
    """Return a metric's finite values, with their steps."""
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [value for _, value in finite_points(rows, name)]


def findings_of(run: RunData) -> list[Hint]:
    """Return the hints of eight rules."""
    total, last, found = run.total_steps, run.last_step, list[Hint]()
    log, when = run.folder / METRICS_FILE, ""
    if (run.rows or log.is_file()) and total is not None and last < total:
        if run.rows and log.is_file():
            at = datetime.fromtimestamp(log.stat().st_mtime)
            when = f"; its last row was written on {at:%Y-%m-%d at %H:%M}"
        found.append(Hint(f"The run has {last} of {total} steps{when}. Is it still running?"))
    found += [Hint(line) for line in run.unread]
    for name in ("train/loss", "train/grad_norm"):
        steps = [int(row["step"]) for row in run.rows if name in row and not math.isfinite(row[name])]
        if steps:
            first = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
            where = f"step {first}" if len(steps) == 1 else f"{len(steps)} steps ({first})"
            found.append(Hint(f"{name} is not finite in {where}: those updates were skipped or lost.", name))
            break
    else:
        skipped = [0.0, *_values(run.rows, "train/skipped_steps")][-1]
        if skipped:
            what = f"{skipped:.0f} steps had no update, because their gradient was not finite."
            found.append(Hint(what, "train/grad_norm"))
    return [*found, *_not_learning(run.rows), *_going_wrong(run.rows)]


def _not_learning(rows: Sequence[Row]) -> Iterator[Hint]:
    """Yield hints for equal rewards and low entropy, unless nearly all answers have the highest reward seen."""
    rewards, highest = _values(rows, "train/reward")[-WINDOW:], _values(rows, "train/reward_max")
    if rewards and highest:
        # Relative to 0, or to the lowest reward if that is negative.
        low, high = min(0.0, *_values(rows, "train/reward_min")), max(highest)
        if high > low and mean(rewards) >= low + _LEARNT * (high - low):
            return
    of_steps = [row for row in rows if "train/reward_min" in row]
    equal = [*takewhile(lambda row: row["train/reward_min"] == row["train/reward_max"], reversed(of_steps))]
    if len(equal) >= WINDOW:
        yield Hint(
            f"All answers of the last {len(equal)} steps have the same reward, {equal[0]['train/reward_min']:.4g}, "
            "so the policy learns nothing: read some of them below.",
            "train/reward_std",
        )
    entropy = _values(rows, "train/entropy")
    if len(entropy) >= 2 * WINDOW:
        first, last = mean(entropy[:WINDOW]), mean(entropy[-WINDOW:])
        if first > 0 and last < _COLLAPSED_ENTROPY * first:
            yield Hint(
                f"Entropy has collapsed, from {first:.3g} to {last:.3g} nats per token, although the reward is not "
                "high: the policy hardly explores any more. Lower the learning rate, or raise the KL penalty or "
                "ratio_clip_max.",
                "train/entropy",
            )


def _going_wrong(rows: Sequence[Row]) -> Iterator[Hint]:
    # Answers from older weights are expected to differ; the rule for the effective sample covers them.
    name = "train/token_mult_prob_error"
    errors = _values([row for row in rows if not row.get("async/age_max")], name)
    if errors and max(errors) >= _LARGE_MISMATCH:
        above = sum(error >= _LARGE_MISMATCH for error in errors)
        yield Hint(
            f"Engine and training disagree: by a factor of up to {max(errors):.4g} per token, and by "
            f"{_LARGE_MISMATCH} or more in {above} of {len(errors)} steps. See policy.generation.mismatch_threshold.",
            name,
        )
    # A reward that was higher before: of validations if there are any, else means over windows of steps.
    for name, width in (("validation/reward", 1), ("train/reward", WINDOW)):
        points = finite_points(rows, name)
        values = [value for _, value in points]
        means = [(points[i - 1][0], mean(values[i - width : i])) for i in range(width, len(values) + 1)]
        if len(values) > 2 and means:
            step, best = max(means, key=lambda point: point[1])
            last, lowest = means[-1][1], min(value for _, value in means)
            if best - last > max(_FALL * (best - lowest), _NOISE * abs(best), 1e-6):
                yield Hint(f"{name} was {best:.4g} at step {int(step)} and is {last:.4g} now.", name)
            break
    truncated = _values(rows, "train/truncation_rate")[-WINDOW:]
    if truncated and mean(truncated) >= _MANY_TRUNCATED:
        yield Hint(
            f"{mean(truncated):.0%} of the answers in the last steps were cut off: policy.generation.max_new_tokens is "
            "too small for them, or they do not end.",
            "train/truncation_rate",
        )
    sample = _values(rows, "async/ess")
    if sample and min(sample) < _SMALL_SAMPLE:
        yield Hint(
            f"The importance weights leave an effective sample of only {min(sample):.0%} of the tokens: answers are "
            "old, or the weights change fast (max_trajectory_age_steps, the learning rate).",
            "async/ess",
        )
