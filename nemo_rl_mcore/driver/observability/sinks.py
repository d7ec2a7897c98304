"""What takes the metrics of each step: a JSON Lines file, which every run has, and a warning of equal rewards."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl_mcore.driver.run_folder import next_free, open_to_append, replacing
from nemo_rl_mcore.errors import RefusedError

METRICS_FILE = "metrics.jsonl"
_STEPS = 10

Row = Mapping[str, float]
"""The metrics of one step, with its number under "step"."""


class JsonlSink:
    """`log_dir/metrics.jsonl`: one object a step, on disk as soon as it is logged.

    JSON knows no NaN and no infinity: a value that is not finite is written as null. A file that an earlier
    run left is renamed to `metrics.1.jsonl`, or the next free number: a file is one run, and nothing is lost.
    A resumed run goes on with the file, and it is the rows after `resumed_step` that are put aside so.
    """

    def __init__(self, log_dir: Path, resumed_step: int | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._path = log_dir / METRICS_FILE
        if self._path.exists() and self._path.stat().st_size:
            if resumed_step is None:
                self._path.rename(next_free(self._path))
            else:
                _put_aside_after(resumed_step, self._path)
        self._file = open_to_append(self._path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; raises OSError, also when the file is no longer there."""
        self._path.stat()  # a file without a name takes every row
        _write_row(self._file, {"step": step, **metrics})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def complete_rows(log_dir: Path, rows: Sequence[Row]) -> None:
    """Make the file of these rows whole: one that was cut off, and those after it, are written again."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with open_to_append(log_dir / METRICS_FILE) as file:
        text = (log_dir / METRICS_FILE).read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            file.truncate(len(whole))
        for row in rows[whole.count(b"\n") :]:
            _write_row(file, row)


def _write_row(file: BinaryIO, row: Row) -> None:
    """Write all of a line; a disk that is nearly full takes a part of it and fails at the rest."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    left = memoryview(json.dumps(finite, allow_nan=False).encode() + b"\n")
    while left:
        left = left[file.write(left) or 0 :]


def _put_aside_after(step: int, path: Path) -> None:
    """Keep the rows up to a step, and move the others, and a row that was cut off, into a file of their own.

    They are copied first, and the file is replaced at once: wherever the process dies, no row is lost.
    """

    def is_kept(line: str) -> bool:
        try:
            return line.endswith("\n") and int(json.loads(line)["step"]) <= step
        except (ValueError, TypeError, KeyError):
            return False

    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    later = [line for line in lines if not is_kept(line)]
    if not later:
        return
    for written, of_lines in ((next_free(path), later), (path, filter(is_kept, lines))):
        with replacing(written) as file:
            file.write("".join(of_lines).encode())


def read_history(
    log_dir: Path, damaged: Callable[[ValueError], object] | None = None
) -> list[dict[str, float]]:
    """Read the rows of a run from its folder; null comes back as NaN.

    damaged: is told of each line that is not a row, which is then left out.

    Raises:
        ValueError: the folder has no metrics.jsonl, or a line of it is not a row and there is no `damaged`. A last
            line that was cut off, as in a run that is being written or was killed, is left out.

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
            rows.append(_row(line, f"{path}:{number}"))
        except ValueError as error:
            if damaged is None:
                raise
            damaged(error)
    return rows


def _row(line: bytes, where: str) -> dict[str, float]:
    try:
        values: dict[str, Any] = json.loads(line)
        if not math.isfinite(values.get("step", math.nan)):
            raise ValueError("its step is no number")
        return {
            sys.intern(name): math.nan if value is None else float(value) for name, value in values.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RefusedError(f"{where} is not a row of metrics: {error}", code="broken-row") from error


class EqualRewardsSink:
    """A metric sink that tells of ten such steps in a row, once a row, or of a shorter run that had no others."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._in_a_row = self._steps = 0
        self._reward = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step whose lowest reward is its highest."""
        if "train/reward_min" not in metrics:
            return
        self._steps += 1
        self._reward = metrics["train/reward_min"]
        self._in_a_row = self._in_a_row + 1 if self._reward == metrics["train/reward_max"] else 0
        if self._in_a_row == _STEPS:
            self._tell()

    def close(self) -> None:
        """Tell of a run that is shorter."""
        if 0 < self._in_a_row == self._steps < _STEPS:
            self._tell()
        self._steps = 0

    def _tell(self) -> None:
        self._notify(
            f"all answers of the last {self._in_a_row} steps have had the reward {self._reward:g}, which teaches "
            "nothing: read some in rollouts/, and what env compares them with (check --full)"
        )
