"""A run's files with each step's metrics and answers.

`metrics.jsonl`; `rollouts/step_N.jsonl.gz`, and `rollouts/validation/step_N.jsonl.gz`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.data.strict_json import open_regular
from nemo_rl_mcore.driver.run_folder import TEMPORARY, next_free, open_to_append, replacing
from nemo_rl_mcore.errors import RefusedError

ROLLOUTS_FOLDER = "rollouts"
VALIDATION_FOLDER = "validation"

_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")
_KEPT_ONE_IN = 10
_MOST_BYTES = 10 << 30
# Higher levels take several times as long for files that are hardly smaller.
_COMPRESSION = 1


class TurnRecord(TypedDict):
    """A message: an answer or an observation, by role. reward: an answer's reward, if the environment replied."""

    role: str
    content: str
    reward: NotRequired[float]


class TokenTable(TypedDict):
    """Columns for the N tokens from the first sampled token to the row's end.

    text: pieces that join to the answer's text. turn: counted from 1, 0 for unsampled tokens. mask: 1 for trained
    tokens; None in a validation. Other columns have 4 decimals, with None for unsampled tokens and non-finite numbers;
    a whole column is None if the algorithm does not compute it, or only the ranks do.
    """

    text: list[str]
    turn: list[int]
    mask: list[int] | None
    generation_logprobs: list[float | None] | None
    prev_logprobs: list[float | None] | None
    advantages: list[float | None] | None


@dataclass(frozen=True)
class Sample:
    """One response with its reward and advantage.

    source: name of the prompt's source, if there are several. reward: the environment's reward. shaped_reward: the
    reward from which advantages are computed. rewards: named unweighted parts, or None. advantage: mean over the
    response's tokens; advantage_first: the first token's; both None if the algorithm has no advantages. sample_mask: 0
    for a response without influence, None in a validation. Weight versions: number of training steps of the weights
    that sampled the oldest and newest tokens. turns: all turns after the prompt, if several are possible. tokens: only
    for a step's first answers.
    """

    step: int
    prompt_index: int
    sample_index: int
    prompt: str
    answer: str
    response: str
    source: str
    reward: float
    shaped_reward: float
    prompt_tokens: int
    response_tokens: int
    truncated: bool
    weight_version_min: int
    weight_version_max: int
    sample_mask: float | None = None
    advantage: float | None = None
    advantage_first: float | None = None
    rewards: dict[str, float | None] | None = None
    turns: list[TurnRecord] | None = None
    tokens: TokenTable | None = None

    @property
    def of_validation(self) -> bool:
        return self.sample_mask is None


class RolloutSink:
    """Writes each step's answers to one complete file.

    An earlier run's files are moved to a folder `rollouts.1`, or the next free number; a resumed run keeps them, and
    moves only those after `resumed_step`. Above 10 GiB the oldest steps are removed, except every tenth step and
    validations.
    """

    def __init__(self, log_dir: Path, config: LoggerConfig, resumed_step: int | None) -> None:
        self._folder, self._config = log_dir / ROLLOUTS_FOLDER, config
        for cut_off in self._folder.rglob(f"*{TEMPORARY}"):
            cut_off.unlink()
        there = {path for path in self._folder.rglob("step_*") if _NAME.fullmatch(path.name)}
        if later := {path for path in there if resumed_step is None or _step_of(path) > resumed_step}:
            aside = next_free(self._folder)
            for path in later:
                moved = aside / path.relative_to(self._folder)
                moved.parent.mkdir(parents=True, exist_ok=True)
                path.rename(moved)
        self._sizes = {path: path.stat().st_size for path in there - later}

    def log(self, step: int, answers: Iterable[Sample]) -> None:
        """Write a step's answers; on OSError no partial file remains."""
        encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
        lines: dict[bool, list[str]] = {False: [], True: []}  # training, then validation
        for sample in answers if self._config.answers_with_tokens is not None else ():
            finite = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in vars(sample).items()
            }
            lines[sample.of_validation].append(f"{encode(finite)}\n")
        for of_validation, of_step in lines.items():
            if of_step:
                # A lone surrogate, which cannot be encoded, becomes its JSON escape.
                text = "".join(of_step).encode(errors="backslashreplace")
                packed = gzip.compress(text, _COMPRESSION, mtime=0)
                folder = self._folder / VALIDATION_FOLDER if of_validation else self._folder
                path = folder / f"step_{step}.jsonl.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    file.write(packed)
                self._sizes[path] = len(packed)
        excess = sum(self._sizes.values()) - _MOST_BYTES
        for path in sorted(self._sizes, key=_step_of) if excess > 0 else ():
            number = _step_of(path)
            kept = path.parent != self._folder or number % _KEPT_ONE_IN == 0 or number == step
            if excess > 0 and not kept:
                path.unlink(missing_ok=True)
                excess -= self._sizes.pop(path)


def read_rollouts(path: Path, most_bytes: int | None = None) -> Iterator[dict[str, object]]:
    """Yield a file's answers; raise ValueError above `most_bytes`, OSError if it is not a regular file."""
    left = most_bytes
    with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        while line := file.readline(-1 if left is None else left + 1):
            if left is not None:
                left -= len(line)
                if left < 0:
                    raise ValueError(f"its answers take more than {most_bytes} bytes")
            yield json.loads(line)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_").partition(".")[0])


METRICS_FILE = "metrics.jsonl"

Row = Mapping[str, float]


class JsonlSink:
    """Writes `log_dir/metrics.jsonl`: an object per step, flushed at once, with null for non-finite values.

    An earlier run's file is renamed to `metrics.1.jsonl`, or the next free number. A resumed run continues the file and
    moves only the rows after `resumed_step`.
    """

    def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._path = log_dir / METRICS_FILE
        if self._path.exists() and self._path.stat().st_size:
            if resumed_step is None:
                self._path.rename(next_free(self._path))
            else:
                kept, later = list[str](), list[str]()
                for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
                    try:
                        is_kept = line.endswith("\n") and int(json.loads(line)["step"]) <= resumed_step
                    except (ValueError, TypeError, KeyError):
                        is_kept = False
                    (kept if is_kept else later).append(line)
                # Copy first, then replace atomically: no row is lost if the process dies.
                for path, lines in ((next_free(self._path), later), (self._path, kept)) if later else ():
                    with replacing(path) as file:
                        file.write("".join(lines).encode())
        self._file = open_to_append(self._path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._path.stat()  # a deleted file that is still open would accept every row
        _write_row(self._file, {"step": step, **metrics})

    def close(self) -> None:
        self._file.close()


def complete_rows(log_dir: Path, rows: Sequence[Row]) -> None:
    """Complete the file with these rows: rewrite the first truncated row and all later ones."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with open_to_append(log_dir / METRICS_FILE) as file:
        text = (log_dir / METRICS_FILE).read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            file.truncate(len(whole))
        for row in rows[whole.count(b"\n") :]:
            _write_row(file, row)


def _write_row(file: BinaryIO, row: Row) -> None:
    """Write a whole line; a nearly full disk accepts a part and fails on the rest."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    left = memoryview(json.dumps(finite, allow_nan=False).encode() + b"\n")
    while left:
        left = left[file.write(left) or 0 :]


def read_history(
    log_dir: Path, damaged: Callable[[ValueError], object] | None = None
) -> list[dict[str, float]]:
    """Read a run's rows from its folder; null becomes NaN, and a truncated last line is skipped.

    Raises ValueError without a metrics.jsonl, and for an invalid row unless `damaged` accepts the error.
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
            values: dict[str, Any] = json.loads(line)
            if not math.isfinite(values.get("step", math.nan)):
                raise ValueError("its step is not a number")
            # Share one string per name among all rows.
            row = {sys.intern(name): math.nan if one is None else float(one) for name, one in values.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            broken = RefusedError(f"{path}:{number} is not a row of metrics: {error}", code="broken-row")
            if damaged is None:
                raise broken from error
            damaged(broken)
        else:
            rows.append(row)
    return rows
