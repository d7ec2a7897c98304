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
    """`log_dir/metrics.jsonl`: one object a step, on disk as soon as it is logged; null stands for what is not finite.

    A file that an earlier run left is renamed to `metrics.1.jsonl`, or the next free number. A resumed run goes on with
    the file, and it is the rows after `resumed_step` that are put aside so.
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
    kept, later = list[str](), list[str]()
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            is_kept = line.endswith("\n") and int(json.loads(line)["step"]) <= step
        except (ValueError, TypeError, KeyError):
            is_kept = False
        (kept if is_kept else later).append(line)
    if not later:
        return
    for written, lines in ((next_free(path), later), (path, kept)):
        with replacing(written) as file:
            file.write("".join(lines).encode())


def read_history(
    log_dir: Path, damaged: Callable[[ValueError], object] | None = None
) -> list[dict[str, float]]:
    """Read the rows of a run from its folder; null comes back as NaN, a last line that was cut off is left out.

    Raises ValueError where there is no metrics.jsonl, or a line is not a row and no `damaged` is told of it instead.
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
                raise ValueError("its step is no number")
            # One string a name, whatever the number of rows.
            row = {sys.intern(name): math.nan if one is None else float(one) for name, one in values.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            broken = RefusedError(f"{path}:{number} is not a row of metrics: {error}", code="broken-row")
            if damaged is None:
                raise broken from error
            damaged(broken)
        else:
            rows.append(row)
    return rows


class EqualRewardsSink:
    """Tells of ten steps in a row whose answers all had one reward, once a row, or of a shorter run of no others."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._in_a_row = self._steps = 0
        self._reward = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/reward_min" not in metrics:
            return
        self._steps += 1
        self._reward = metrics["train/reward_min"]
        self._in_a_row = self._in_a_row + 1 if self._reward == metrics["train/reward_max"] else 0
        if self._in_a_row == _STEPS:
            self._tell()

    def close(self) -> None:
        if 0 < self._in_a_row == self._steps < _STEPS:
            self._tell()
        self._steps = 0

    def _tell(self) -> None:
        self._notify(
            f"all answers of the last {self._in_a_row} steps have had the reward {self._reward:g}, which teaches "
            "nothing: read some in rollouts/, and what env compares them with (check --full)"
        )
