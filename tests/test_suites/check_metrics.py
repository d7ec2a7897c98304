"""Check the metrics of a run: `check_metrics.py METRICS_JSON --steps N CHECK...`; exit status 1 when a check fails.

METRICS_JSON is what dump_metrics.py writes: {"train/loss": {"1": 0.5, ...}, ...}. A check is true or false:

    median(data["train/token_mult_prob_error"]) < 1.1 and data["validation/accuracy"]["200"] >= 0.9

Its text is parsed and interpreted here, never handed to Python, and it may hold nothing but
  comparisons    < <= > >= == !=, chained, joined by `and`
  numbers        literals, + - * /, and a value at a step: data["name"]["step"]
  helpers        min, max, mean, median (series, range_start=1, range_end=0) and ratio_above(series, threshold, ...),
                 the share of values at or above a threshold; a series is data["name"]
A range holds steps: its end is exclusive and 0 is the end of the run, negative steps count from there, and step 0,
before the first update, is outside by default. So mean(data["name"], -10) is over the last ten steps.

A series that a check reads must be finite at every step of the run, from 1 to N; only those of validation/, and of a
run before this one (warm_start/, teacher/), may have other steps. All parts of a check are evaluated, so that none
hides what is missing in another one.
"""

import argparse
import ast
import json
import math
import operator
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_CHECK = 300
"""Characters; it bounds how deeply an expression can be nested."""
OTHER_STEPS = ("validation/", "warm_start/", "teacher/")

Series = dict[int, float]
Number = Callable[["Metrics"], float]

_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_HELPERS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
}
_RATIO_ABOVE = "ratio_above"
_RANGE: dict[str, ast.expr] = {"range_start": ast.Constant(1), "range_end": ast.Constant(0)}
_STEP = re.compile(r"0|[1-9][0-9]*", re.ASCII)


class CheckError(ValueError):
    """A check that is no such expression, or that the metrics cannot answer."""


@dataclass(frozen=True)
class Metrics:
    """The series of a run of so many steps, as they were read; a series is judged when a check reads it."""

    raw: Mapping[str, object]
    steps: int

    def series(self, name: str) -> Series:
        """The finite values by step; raises CheckError."""
        raw = self.raw.get(name)
        if not isinstance(raw, Mapping):
            raise CheckError(f"there is no metric {name!r}")
        series = {_step(name, step): _value(f"{name} at step {step}", value) for step, value in raw.items()}
        if not series:
            raise CheckError(f"{name} is empty")
        if not name.startswith(OTHER_STEPS):
            self._require_every_step(name, series)
        return series

    def _require_every_step(self, name: str, series: Series) -> None:
        missing = sorted({*range(1, self.steps + 1)} - series.keys())
        foreign = sorted(series.keys() - {*range(self.steps + 1)})
        if missing:
            raise CheckError(
                f"{name} has no value at {len(missing)} of {self.steps} steps: {missing[0]}, ..."
            )
        if foreign:
            raise CheckError(f"{name} has a value at step {foreign[0]}, and the run has {self.steps} steps")


def _step(name: str, step: str) -> int:
    if not _STEP.fullmatch(step):
        raise CheckError(f"{name} has a value at {step!r}, which is no step")
    return int(step)


def _value(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckError(f"{where} is {json.dumps(value)}, no number")
    return _finite(where, lambda: float(value))


def _finite(where: str, compute: Callable[[], float]) -> float:
    try:
        number = compute()
    except ArithmeticError as error:
        raise CheckError(f"{where}: {error}") from error
    if not math.isfinite(number):
        raise CheckError(f"{where} is {number}, which is not finite")
    return number


@dataclass(frozen=True)
class Comparison:
    """Numbers in a row and what must hold between neighbours."""

    numbers: tuple[Number, ...]
    relations: tuple[Callable[[float, float], bool], ...]


@dataclass(frozen=True)
class Check:
    """A parsed check."""

    text: str
    comparisons: tuple[Comparison, ...]

    def evaluate(self, metrics: Metrics) -> tuple[bool, list[float]]:
        """Whether it holds, and the numbers that were compared; raises CheckError."""
        rows = [[number(metrics) for number in comparison.numbers] for comparison in self.comparisons]
        holds = all(
            relation(left, right)
            for row, comparison in zip(rows, self.comparisons, strict=True)
            for relation, left, right in zip(comparison.relations, row, row[1:], strict=False)
        )
        return holds, [number for row in rows for number in row]


def parse_check(text: str) -> Check:
    """Parse a check; raises CheckError for anything that the grammar above does not have."""
    if len(text) > LONGEST_CHECK:
        raise CheckError(f"a check has at most {LONGEST_CHECK} characters, and this one {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CheckError(f"is no expression: {error}") from error
    both = isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)
    parts = tree.values if both else [tree]
    return Check(text, tuple(_comparison(part) for part in parts))


def _comparison(node: ast.expr) -> Comparison:
    if not isinstance(node, ast.Compare):
        raise _forbidden(node, "a comparison")
    unknown = [relation for relation in node.ops if type(relation) not in _COMPARISONS]
    if unknown:
        raise _forbidden(node, "a comparison by < <= > >= == or !=")
    numbers = tuple(_number(operand) for operand in (node.left, *node.comparators))
    return Comparison(numbers, tuple(_COMPARISONS[type(relation)] for relation in node.ops))


def _number(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            constant = _value("the number", value)
            return lambda _: constant
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _number(operand)
            return lambda metrics: -inner(metrics)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _arithmetic(node, _ARITHMETIC[type(op)], _number(left), _number(right))
        case ast.Subscript(value=ast.Subscript() as series, slice=ast.Constant(value=str(step))):
            return _at_step(_series_name(series), _step("a check", step))
        case ast.Call(func=ast.Name(id=name)) if name in (*_HELPERS, _RATIO_ABOVE):
            return _helper(name, node)
        case _:
            raise _forbidden(node, 'a number, data["name"]["step"] or a helper')


def _arithmetic(
    node: ast.expr, compute: Callable[[float, float], float], left: Number, right: Number
) -> Number:
    where = f"column {node.col_offset + 1}"
    return lambda metrics: _finite(where, lambda: compute(left(metrics), right(metrics)))


def _at_step(name: str, step: int) -> Number:
    def value(metrics: Metrics) -> float:
        series = metrics.series(name)
        if step not in series:
            raise CheckError(f"{name} has no value at step {step}")
        return series[step]

    return value


def _helper(name: str, call: ast.Call) -> Number:
    given = _arguments(name, call)
    series = _series_name(given["series"])
    start, end = (_range_bound(given[bound]) for bound in _RANGE)

    def values(metrics: Metrics) -> list[float]:
        return _in_range(series, metrics.series(series), start, end)

    if name == _RATIO_ABOVE:
        threshold = _number(given["threshold"])
        return lambda metrics: _share_at_or_above(threshold(metrics), values(metrics))
    reduce = _HELPERS[name]
    return lambda metrics: _finite(f"{name} of {series}", lambda: reduce(values(metrics)))


def _arguments(name: str, call: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a helper by name, those of the range filled in."""
    required = ["series", "threshold"] if name == _RATIO_ABOVE else ["series"]
    parameters = [*required, *_RANGE]
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    pairs = [*zip(parameters, call.args, strict=False), *named]
    given = {parameter: value for parameter, value in pairs if parameter in parameters}
    # Fewer than there are arguments: one is unknown, is given twice, or is one too many.
    if len(given) < len(call.args) + len(named) or not given.keys() >= {*required}:
        raise _forbidden(call, f"{name}({', '.join(parameters)})")
    return _RANGE | given


def _range_bound(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(bound)) if not isinstance(bound, bool):
            return bound
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(bound))) if not isinstance(
            bound, bool
        ):
            return -bound
        case _:
            raise _forbidden(node, "a whole number as the bound of a range")


def _in_range(name: str, series: Series, start: int, end: int) -> list[float]:
    behind_last = max(series) + 1
    first = start + behind_last if start < 0 else start
    stop = end + behind_last if end <= 0 else end
    values = [value for step, value in series.items() if first <= step < stop]
    if not values:
        raise CheckError(f"{name} has no value at steps {first} to {stop - 1}")
    return values


def _share_at_or_above(threshold: float, values: Sequence[float]) -> float:
    return sum(value >= threshold for value in values) / len(values)


def _series_name(node: ast.expr) -> str:
    match node:
        case ast.Subscript(value=ast.Name(id="data"), slice=ast.Constant(value=str(name))):
            return name
        case _:
            raise _forbidden(node, 'a series, data["name"]')


def _forbidden(node: ast.expr, wanted: str) -> CheckError:
    return CheckError(f"{type(node).__name__} at column {node.col_offset + 1} is not {wanted}")


def read_metrics(path: Path, steps: int) -> Metrics:
    """Read what dump_metrics.py wrote; raises CheckError, also for a metric or a step that is there twice."""
    try:
        tree = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise CheckError(f"{path} does not hold an object")
    return Metrics(tree, steps)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise CheckError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return members


def verdict(text: str, metrics: Metrics | None) -> tuple[bool, str]:
    """Whether a check passes, and the line that says so; without metrics, whether it can be parsed."""
    try:
        check = parse_check(text)
        if metrics is None:
            return True, f"parsed  {text}"
        holds, numbers = check.evaluate(metrics)
    except CheckError as error:
        return False, f"FAIL    {text}: {error}"
    shown = ", ".join(f"{number:.6g}" for number in numbers)
    return holds, f"{'pass' if holds else 'FAIL'}    {text}: {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Say how each check stands; 0 when all pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path, metavar="METRICS_JSON")
    parser.add_argument("checks", nargs="+", metavar="CHECK")
    parser.add_argument("--steps", type=int, required=True, help="the steps of the run")
    parser.add_argument("--parse-only", action="store_true", help="read no metrics: are these checks at all?")
    options = parser.parse_args(arguments)
    try:
        metrics = None if options.parse_only else read_metrics(options.metrics, options.steps)
    except CheckError as error:
        sys.stdout.write(f"FAIL    {error}\n")
        return 1
    verdicts = [verdict(text, metrics) for text in options.checks]
    sys.stdout.writelines(f"{line}\n" for _, line in verdicts)
    return 0 if all(passed for passed, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
