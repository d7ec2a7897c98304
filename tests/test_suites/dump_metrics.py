"""Turn the metrics.jsonl of a run into JSON that checks read: `dump_metrics.py LOG_DIR METRICS_JSON`.

A row a step becomes a series a metric, {"train/loss": {"1": 0.5, ...}, ...}. The metrics of a run before this one, for
its weights or its teacher's, have the name of its folder before theirs: "teacher/validation/accuracy". Exit status 1,
and nothing is written, when a file is missing or cut off, or a step is missing or there twice.
"""

import json
import sys
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
RUNS_BEFORE = ("warm_start", "teacher")
"""Folders in that of the run."""


def read_rows(log_dir: Path) -> list[dict[str, Any]]:
    """The rows, one for each step from 0 or 1 to the last; raises ValueError."""
    path = log_dir / METRICS_FILE
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ValueError(f"{path} is empty, or its last row is cut off")
    rows = [json.loads(line) for line in text.splitlines()]
    first = 0 if rows[0]["step"] == 0 else 1  # a validation before the first step
    for expected, row in enumerate(rows, start=first):
        if row["step"] != expected:
            raise ValueError(f"{path}: step {row['step']} stands where step {expected} should")
    return rows


def to_series(rows: list[dict[str, Any]], prefix: str = "") -> dict[str, dict[str, Any]]:
    """The values of each metric by step; a value that was not finite is null, as in the rows."""
    series: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                series.setdefault(prefix + name, {})[str(row["step"])] = value
    return series


def main(log_dir: str, output: str) -> int:
    """Write the series; 1 when the rows are not whole."""
    try:
        series = to_series(read_rows(Path(log_dir)))
        for name in RUNS_BEFORE:
            if (folder := Path(log_dir) / name).is_dir():
                series |= to_series(read_rows(folder), f"{name}/")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    Path(output).write_text(json.dumps(series, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
