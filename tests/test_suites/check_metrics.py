"""Check the metrics of a run: `check_metrics.py LOG_DIR --steps N CHECK...`; exit status 1 when a check fails.

A check is an expression of Python that is true or false:

    median(data["train/token_mult_prob_error"]) < 1.1 and data["validation/accuracy"]["200"] >= 0.9

Its names are data, min, max, mean and median; the latter take (series, range_start=1, range_end=0). A range holds
steps: its end is exclusive and 0 is the end of the run, negative steps count from there, and step 0, before the first
update, is outside by default. So mean(data["name"], -10) is over the last ten steps.

A series that a check reads must be finite, and there at every step of the run, from 1 to N; only those of validation/,
and of a run before this one (warm_start/, teacher/), may have other steps.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

RUNS_BEFORE = ("warm_start/", "teacher/")
"""Folders in that of the run, and what is before the names of their metrics."""
REDUCE: dict[str, Callable[[Iterable[float]], float]] = {
    "min": min, "max": max, "mean": statistics.fmean, "median": statistics.median,
}  # fmt: skip

Series = dict[str, float]


class Metrics(dict[str, Series]):
    """The series of a run by name, each by step; one is judged when a check reads it."""

    def __init__(self, log_dir: Path, steps: int) -> None:
        super().__init__()
        self._steps = {str(step) for step in range(1, steps + 1)}
        for prefix in ("", *(name for name in RUNS_BEFORE if (log_dir / name).is_dir())):
            for line in (log_dir / prefix / "metrics.jsonl").read_text("utf-8").splitlines():
                row = json.loads(line)
                step = str(row.pop("step"))
                for name, value in row.items():
                    if step in (series := self.setdefault(prefix + name, {})):
                        raise ValueError(f"{prefix}{name} has two values at step {step}")
                    series[step] = value

    def __getitem__(self, name: str) -> Series:
        series = super().__getitem__(name)
        no_numbers = [step for step, value in series.items() if value is None or not math.isfinite(value)]
        missing = [] if name.startswith(("validation/", *RUNS_BEFORE)) else self._steps - series.keys()
        if no_numbers or missing:
            raise ValueError(f"{name} has no number at steps {sorted([*no_numbers, *missing])}")
        return series


def _over_steps(reduce: Callable[[Iterable[float]], float]) -> Callable[..., float]:
    def of(series: Series, range_start: int = 1, range_end: int = 0) -> float:
        end = max(map(int, series)) + 1
        first = range_start + end if range_start < 0 else range_start
        stop = range_end + end if range_end <= 0 else range_end
        return reduce([value for step, value in series.items() if first <= int(step) < stop])

    return of


def holds(check: str, data: Metrics | None) -> bool:
    """Whether a check holds; without metrics, whether it can be asked at all. Raises what is wrong with it."""
    code = compile(check, "<check>", "eval")
    if unknown := {*code.co_names} - {"data", *REDUCE}:
        raise NameError(f"there is no {sorted(unknown)}")
    helpers = {name: _over_steps(reduce) for name, reduce in REDUCE.items()}
    return data is None or bool(eval(code, {"data": data, **helpers}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Say how each check stands; 0 when all pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log_dir", type=Path, metavar="LOG_DIR")
    parser.add_argument("checks", nargs="+", metavar="CHECK")
    parser.add_argument("--steps", type=int, required=True, help="the steps of the run")
    parser.add_argument("--parse-only", action="store_true", help="read no metrics: are these checks at all?")
    options = parser.parse_args(arguments)
    data = None if options.parse_only else Metrics(options.log_dir, options.steps)
    failed = 0
    for check in options.checks:
        try:
            verdict = "pass" if holds(check, data) else "FAIL"
        except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
            verdict = f"FAIL ({error!r})"
        failed += verdict != "pass"
        sys.stdout.write(f"{verdict}  {check}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
