"""Reads a run's folder, however incomplete: the run may still be running, or have been killed."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.driver.observability.sinks import (
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    VALIDATION_FOLDER,
    read_history,
    read_rollouts,
)
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE, Event, read_events
from nemo_rl_mcore.driver.run_folder import RECIPE_FILE, Tree, leaves, read_recipe_of
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.tools.evaluate.samples import RESULTS_FILE

WINDOW = 10
"""Steps whose mean represents a run's beginning or end."""
_MOST_EVENT_BYTES = 64 << 20
"""Largest log that is read, so that a run's end does not wait long for its page."""
_STEPS = 12
_ANSWERS = 24
_LONGEST_TEXT = 20_000
_MOST_TOKENS = 2000
"""Tokens shown per answer: each takes some 60 bytes of the page and an element in the browser."""
_MOST_BYTES = 256 << 20
"""Largest unpacked file of a step's answers: in memory they take several times as much."""
_NUMBERS = re.compile(r"(\D*)(\d*)")
_ROLLOUTS_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")
_ALWAYS = ("prompt", "response")
_MOST_POINTS = 1000
"""Points per curve; longer ones keep the lowest and highest of each stretch, so that no spike is lost."""
_DIGITS = 6


@dataclass(frozen=True)
class RunData:
    """A run, read from its folder.

    recipe: the resolved recipe, None if missing. events: an asynchronous run's log. evaluations: `eval` results by
    subfolder. unread: messages about unreadable files. called: a name to show instead of the folder's.
    """

    folder: Path
    rows: Sequence[dict[str, float]] = ()
    recipe: Tree | None = None
    events: Sequence[Event] = ()
    evaluations: dict[str, Tree] = field(default_factory=dict[str, Tree])
    unread: Sequence[str] = ()
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or Path(os.path.abspath(self.folder)).name or str(self.folder)

    @property
    def algorithm(self) -> str | None:
        return next((name for name in RUN_CONFIGS if isinstance((self.recipe or {}).get(name), dict)), None)

    @property
    def last_step(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def total_steps(self) -> int | None:
        steps = self.keys.get(f"{self.algorithm}.max_num_steps")
        return steps if isinstance(steps, int) else None

    @property
    def keys(self) -> dict[str, Any]:
        return dict(leaves(self.recipe)) if self.recipe is not None else {}


def mean(values: Sequence[float]) -> float:
    """Return the mean, even if the sum would overflow."""
    return math.fsum(value / len(values) for value in values)


def read_run(folder: Path) -> RunData:
    """Read a folder; raises ValueError if it holds neither a run nor an evaluation."""
    unread: list[str] = []

    def tried[Found](read: Callable[[Path], Found], path: Path, default: Found) -> Found:
        try:
            return read(path) if path.is_file() else default
        except (OSError, ValueError) as error:
            unread.append(str(error))
            return default

    # Natural order: step_2 before step_10.
    below = sorted(
        folder.glob(f"*/{RESULTS_FILE}"),
        key=lambda path: [(int(digits or 0), text) for text, digits in _NUMBERS.findall(str(path))],
    )
    evaluations: dict[str, Tree] = {}
    for path in (folder / RESULTS_FILE, *below):
        results: Any = tried(read_json, path, None)
        if results is None:
            continue
        try:
            means = [found["mean"] for of_set in results.values() for found in of_set["metrics"].values()]
        except (AttributeError, KeyError, TypeError):
            means = [None]
        if all(isinstance(mean, int | float) for mean in means):
            evaluations[str(path.parent.relative_to(folder))] = results
        else:
            unread.append(f"{path} holds no evaluation results")
    if not (folder / METRICS_FILE).is_file() and not evaluations:
        advice = "name a run's folder (its logger.log_dir) or an evaluation's"
        raise RefusedError(
            f"{folder} holds neither {METRICS_FILE} nor {RESULTS_FILE}; {advice}", code="no-run"
        )
    damaged: list[ValueError] = []
    rows = tried(lambda path: read_history(path.parent, damaged.append), folder / METRICS_FILE, [])
    if damaged:
        more = f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        unread.append(f"{damaged[0]}{more}")
    recipe = tried(lambda path: read_recipe_of(path.parent), folder / RECIPE_FILE, None)
    log, events = folder / EVENTS_FILE, list[Event]()
    if log.is_file() and (size := log.stat().st_size) > _MOST_EVENT_BYTES:
        unread.append(f"{log} has {size >> 20} MiB and is not read: the page does not show its faults")
    else:
        events = tried(read_events, log, events)
    return RunData(folder, rows, recipe, events, evaluations, unread)


def columns_of(rows: Sequence[dict[str, float]]) -> dict[str, list[float | str | None]]:
    """Return each metric's values: None for a row without the metric, "" for a value that is not finite.

    If there are many rows, each stretch of rows keeps two values per metric: the lowest and the highest, in order; for
    times, whose parts must add up, those of its first and last row. CPU seconds and startup times are left out.
    """
    every = dict.fromkeys(name for row in rows for name in row)
    names = [one for one in every if not (one.endswith("_cpu") or one.startswith("timing/startup/"))]
    width = math.ceil(2 * len(rows) / _MOST_POINTS)
    if width <= 2:
        return {name: [_rounded(row.get(name)) for row in rows] for name in names}
    stretches = [rows[start : start + width] for start in range(0, len(rows), width)]
    kept: dict[str, list[float | str | None]] = {name: [] for name in names}
    for stretch in stretches:
        for name in names:
            values = [row.get(name) for row in stretch]
            known = ((value, place) for place, value in enumerate(values) if value is not None)
            finite = [(value, place) for value, place in known if math.isfinite(value)]
            ends = [0, len(stretch) - 1]
            if finite and name != "step" and not name.startswith("timing/"):
                ends = sorted([min(finite)[1], max(finite)[1]])
            kept[name] += [_rounded(values[place]) for place in ends]
    return kept


def _rounded(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else ""


def steps_shown(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return steps with answers, {step, kind, total, answers}, and messages about unreadable files.

    These are at most 12 training steps and 12 validations, including the first and last, with at most 24 answers each.
    """
    shown, unread = list[dict[str, Any]](), list[str]()
    rollouts = folder / ROLLOUTS_FOLDER
    for kind, of_kind in (("training", rollouts), ("validation", rollouts / VALIDATION_FOLDER)):
        names = ((_ROLLOUTS_NAME.fullmatch(path.name), path) for path in of_kind.glob("step_*"))
        files = sorted((int(match[1]), path) for match, path in names if match)
        if len(files) > _STEPS:
            files = [files[round(place * (len(files) - 1) / (_STEPS - 1))] for place in range(_STEPS)]
        for step, path in files:
            try:
                answers: list[Any] = [*read_rollouts(path, _MOST_BYTES)]
                for line, one in enumerate(answers, 1):
                    if not isinstance(one, dict) or not all(
                        isinstance(one.get(name), str) for name in _ALWAYS
                    ):
                        raise ValueError(f"line {line} is not an answer")
                some = [_shortened(answer) for answer in some_of(answers)]
                json.dumps(some, allow_nan=False)
            except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
                unread.append(f"{path} cannot be read: {error}")
            else:
                shown.append({"step": step, "kind": kind, "total": len(answers), "answers": some})
    return shown, unread


def some_of(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose at most 24 answers, kept in order: those with tokens first, then the lowest and highest rewards."""
    rewards = [answer.get("reward") for answer in answers]
    given = [reward if isinstance(reward, int | float) else 0.0 for reward in rewards]
    by_reward = sorted(range(len(answers)), key=given.__getitem__)
    with_tokens = [place for place, answer in enumerate(answers) if answer.get("tokens")]
    # Alternating between both ends.
    extremes = [place for pair in zip(by_reward, reversed(by_reward), strict=True) for place in pair]
    chosen = list(dict.fromkeys([*with_tokens, *extremes]))[:_ANSWERS]
    return [answers[place] for place in sorted(chosen)]


def _shortened(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with its texts, turns and tokens cut to fit a page; raises ValueError if these are malformed.

    All turns together have the length limit of one text. Of the tokens the first ones stay, with the number of `more`.
    """
    found = {**answer, "turns": None, "tokens": None}
    found |= {name: _cut(answer[name]) for name in (*_ALWAYS, "answer") if isinstance(answer.get(name), str)}
    try:
        if turns := answer.get("turns"):
            found["turns"], left = list[dict[str, Any]](), _LONGEST_TEXT
            for place, turn in enumerate(turns):
                if left <= 0:
                    found["turns"].append({"role": f"{len(turns) - place} more turns", "content": "…"})
                    break
                found["turns"].append({**turn, "content": _cut(turn["content"], left)})
                left -= len(turn["content"])
        if tokens := answer.get("tokens"):
            columns = (tokens["text"], tokens["turn"], *tokens.values())
            if len({len(column) for column in columns if column is not None}) > 1:
                raise ValueError("the lists of an answer's tokens differ in length")
            found["tokens"] = {name: column and column[:_MOST_TOKENS] for name, column in tokens.items()}
            found["tokens"]["more"] = max(0, len(tokens["text"]) - _MOST_TOKENS)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"an answer's turns or tokens are malformed: {error!r}") from error
    return found


def _cut(text: str, most: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"
