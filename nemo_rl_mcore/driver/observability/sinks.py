"""What takes the metrics of each step: a JSON Lines file, which every run has, and a warning of equal rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nemo_rl_mcore.driver.own_files import next_free, open_to_append, replacing

METRICS_FILE = "metrics.jsonl"


class MetricSink(Protocol):
    """A place that takes the metrics of one step at a time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def close(self) -> None:
        """Write what is left and release the place; idempotent."""
        ...


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
        _write_whole(self._file, _line({"step": step, **metrics}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def complete_rows(log_dir: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Make the file of these rows whole: one that was cut off, and those after it, are written again."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with open_to_append(log_dir / METRICS_FILE) as file:
        text = (log_dir / METRICS_FILE).read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            file.truncate(len(whole))
        for row in rows[whole.count(b"\n") :]:
            _write_whole(file, _line(row))


def _line(row: Mapping[str, float]) -> bytes:
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _write_whole(file: BinaryIO, line: bytes) -> None:
    """Write all of a line; a disk that is nearly full takes a part of it and fails at the rest."""
    left = memoryview(line)
    while left:
        left = left[file.write(left) or 0 :]


def _put_aside_after(step: int, path: Path) -> None:
    """Keep the rows up to a step, and move the others, and a row that was cut off, into a file of their own.

    They are copied first, and the file is replaced at once: wherever the process dies, no row is lost.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    parts: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        parts[_is_row_up_to(step, line)].append(line)
    if not parts[False]:
        return
    for kept, file_path in ((False, next_free(path)), (True, path)):
        with replacing(file_path) as file:
            file.write("".join(parts[kept]).encode())


def _is_row_up_to(step: int, line: str) -> bool:
    try:
        row: Any = json.loads(line)
        return line.endswith("\n") and int(row["step"]) <= step
    except (ValueError, TypeError, KeyError):
        return False


_STEPS = 10


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
