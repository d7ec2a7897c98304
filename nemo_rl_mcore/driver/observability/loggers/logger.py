"""What a logger is, and what it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from nemo_rl_mcore.driver.observability.rollouts import Sample

_COLUMNS = (
    *("step", "prompt_index", "source", "prompt", "answer", "response", "reward", "advantage"),
    *("response_tokens", "truncated"),
)
_RUN_ID = re.compile(r"\w+")


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of the run when it opens.

    recipe: resolved, as JSON has it. resumed_step: the last step that is behind a run that goes on, else None.
    rewards_teach: whether the loss is of rewards, and not of given answers or a teacher alone.
    """

    algorithm: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resumed_step: int | None = None
    rewards_teach: bool = True


@dataclass(frozen=True)
class SampleTable:
    """Answers of a step for people to read. name: `train/samples` or `validation/samples`."""

    name: str
    rows: Sequence[Sequence[Any]]
    columns: Sequence[str] = _COLUMNS


class Logger(Protocol):
    """A place that is shown a run. Any call may fail or hang; `Loggers` then goes on without it.

    where: what a person opens, or types, to see the run; known once it is open.
    """

    where: str

    def open(self) -> None:
        """Begin the run there, or go on with it."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], tables: Sequence[SampleTable]) -> None:
        """Take a step's metrics, and what is shown of its answers."""
        ...

    def finish(self, exit_status: int) -> None:
        """Take the end of the run: 0, 1 for a failure, above 128 after a signal."""
        ...

    def abandon(self) -> None:
        """Release what it holds after a call that failed, without a wait."""
        ...


def tables_of(samples: Iterable[Sample], rows: int, *, of_training: bool) -> Iterator[SampleTable]:
    """Yield what is shown of a step: of each prompt's first answer so many rows, those of a validation apart."""
    first = [sample for sample in samples if sample.sample_index == 0]
    for name, of_validation in (("train/samples", False), ("validation/samples", True)):
        shown = [sample for sample in first if sample.of_validation is of_validation][:rows]
        if shown and (of_validation or of_training):
            yield SampleTable(
                name, [[_cell(getattr(sample, column)) for column in _COLUMNS] for sample in shown]
            )


def flattened(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe as dotted paths, and their values as text; a list is one value."""
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(cast("Mapping[str, Any]", value), f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)


def kept_run_id(file: Path, resumed_step: int | None) -> str | None:
    """Return the id under which a service knows a continued run; None for a new run, or one that it never had."""
    if resumed_step is None or not file.is_file():
        return None
    kept = file.read_text(encoding="utf-8", errors="replace").strip()
    return kept if _RUN_ID.fullmatch(kept) else None


def _cell(value: Any) -> Any:
    """Return a lone surrogate, which no encoding takes, becomes the escape that JSON has for it."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
