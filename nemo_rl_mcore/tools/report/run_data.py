"""What the folder of a run holds, read as far as it is there: a run may be at work, or have been killed."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.driver.observability.report import read_history
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.rollouts.event_log import log_in, read_events
from nemo_rl_mcore.driver.rollouts.events import Event
from nemo_rl_mcore.driver.saved_run import RECIPE_FILE, Tree, leaves, read_recipe_of
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.tools.evaluate.folder import RESULTS_FILE

WINDOW = 10
"""Steps whose mean stands for the beginning and the end of a run."""
_MOST_EVENT_BYTES = 64 << 20
"""Of a log, which takes seconds to read: a run that ends is not to wait longer for its page."""


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it.

    recipe: the resolved one; None where there is none. events: of an asynchronous run. evaluations: the results of
    `eval`, by the folder below this one. unread: what is there and could not be read, in words. called: its name, where
    it is not the folder's.
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
        """Return what the run is called beside others."""
        return self.called or Path(os.path.abspath(self.folder)).name or str(self.folder)

    @property
    def algorithm(self) -> str | None:
        """Return the section of its loop, which is the algorithm's name."""
        return next((name for name in RUN_CONFIGS if isinstance((self.recipe or {}).get(name), dict)), None)

    @property
    def last_step(self) -> int:
        """Return the last step that was finished; 0 where there is none."""
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def total_steps(self) -> int | None:
        """Return how many steps the recipe asks for."""
        steps = self.keys.get(f"{self.algorithm}.max_num_steps")
        return steps if isinstance(steps, int) else None

    @property
    def keys(self) -> dict[str, Any]:
        """Return the recipe as values by their paths."""
        return dict(leaves(self.recipe)) if self.recipe is not None else {}

    @property
    def recipe_text(self) -> str:
        """Return the recipe as YAML."""
        return yaml.safe_dump(self.recipe, sort_keys=False) if self.recipe is not None else ""

    @property
    def written_at(self) -> datetime | None:
        """Return when the last row was written."""
        path = self.folder / METRICS_FILE
        return datetime.fromtimestamp(path.stat().st_mtime) if path.is_file() else None


def mean(values: Sequence[float]) -> float:
    """Return the mean, also where the sum is too large for a float."""
    return math.fsum(value / len(values) for value in values)


def read_run(folder: Path) -> RunData:
    """Read a folder; raises ValueError where it is that of no run and no evaluation."""
    unread: list[str] = []

    def tried[Found](read: Any, *given: Any, default: Found) -> Found:
        try:
            return read(*given)
        except (OSError, ValueError) as error:
            unread.append(str(error))
            return default

    evaluations = dict(_evaluations(folder, tried))
    if not (folder / METRICS_FILE).is_file() and not evaluations:
        raise RefusedError(
            f"{folder} holds neither {METRICS_FILE} nor {RESULTS_FILE}; give the folder of a run (its logger.log_dir), "
            "or that of an evaluation",
            code="no-run",
        )
    damaged: list[ValueError] = []
    rows = (
        tried(read_history, folder, damaged.append, default=[]) if (folder / METRICS_FILE).is_file() else []
    )
    if damaged:
        more = f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        unread.append(f"{damaged[0]}{more}")
    recipe = tried(read_recipe_of, folder, default=None) if (folder / RECIPE_FILE).is_file() else None
    log = log_in(folder)
    events = tried(_events, log, default=[]) if log.is_file() else []
    return RunData(folder, rows, recipe, events, evaluations, unread)


def _events(path: Path) -> list[Event]:
    if (size := path.stat().st_size) > _MOST_EVENT_BYTES:
        raise ValueError(
            f"{path} has {size >> 20} MiB, which the page does not read: it tells no faults of it"
        )
    return read_events(path)


def told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Return the same; those whose folders have one name are called by their whole path."""
    names = Counter(run.name for run in runs)
    return [replace(run, called=str(run.folder)) if names[run.name] > 1 else run for run in runs]


def _evaluations(folder: Path, tried: Any) -> Iterator[tuple[str, Tree]]:
    """Yield the results of the folder itself, and of those in it."""
    for path in (folder / RESULTS_FILE, *sorted(folder.glob(f"*/{RESULTS_FILE}"), key=_by_numbers)):
        if path.is_file() and (results := tried(_results, path, default=None)) is not None:
            yield str(path.parent.relative_to(folder)), results


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """So that step_2 stands before step_10."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", str(path))]


def _results(path: Path) -> Tree:
    results: Any = read_json(path)
    try:
        means = [found["mean"] for of_set in results.values() for found in of_set["metrics"].values()]
    except (AttributeError, KeyError, TypeError):
        means = [None]
    if not all(isinstance(mean, int | float) for mean in means):
        raise ValueError(f"{path} holds no results of an evaluation")
    return results
