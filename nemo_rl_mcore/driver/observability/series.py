"""The values of a metric over a run: which one is best, whether it says anything, and how it looks in a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

VALIDATION_PREFIX = "validation/"
_ZERO_WHERE_UNUSED = ("train/kl_penalty", "train/probs_ratio_clipfrac")
"""Metrics of a loss that are 0 all along where the recipe has nothing to penalise or to clip."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


class Best(NamedTuple):
    """A value, and the step that had it."""

    step: int
    value: float


def higher_is_better(name: str) -> bool:
    """Return whether the best value of a metric is its highest: of what a validation finds, but for losses."""
    return name.startswith(VALIDATION_PREFIX) and not name.endswith("loss")


def best_of(name: str, one: Best | None, other: Best) -> Best:
    """Return the better of two values of a metric; the earlier one where they are equal."""
    if one is None or one.value == other.value:
        return one or other
    return max(one, other, key=lambda best: best.value if higher_is_better(name) else -best.value)


def is_sparse(name: str, values: Sequence[float], steps: int) -> bool:
    """Return whether a metric belongs to a step now and then, so that means over steps say nothing of it."""
    return name.startswith(VALIDATION_PREFIX) or 2 * len(values) < steps


def shown_metrics(metrics: Mapping[str, float]) -> frozenset[str]:
    """Return the metrics that are worth a line in what a person sees."""
    return frozenset(name for name, value in metrics.items() if value or name not in _ZERO_WHERE_UNUSED)


def shown_in(rows: Iterable[Mapping[str, float]]) -> frozenset[str]:
    """`shown_metrics` of any of the rows."""
    return frozenset[str]().union(*(shown_metrics(row) for row in rows))


def sparkline(values: Sequence[float], at_least: float = 0.0) -> str:
    """Draw a series as at most 40 characters, each the mean of its share; NaN is a gap.

    The scale goes from 0 to the highest value, or to `at_least`, and from the lowest one where that is below 0.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([at_least, *finite])
    height = (high - low) or 1.0
    top = len(_SPARK) - 1
    drawn = [(min(max(value, low), high) - low) / height for value in _downsampled(values)]
    return "".join(" " if value != value else _SPARK[round(value * top)] for value in drawn)


def _downsampled(values: Sequence[float]) -> list[float]:
    if len(values) <= _SPARK_WIDTH:
        return list(values)
    edges = [position * len(values) // _SPARK_WIDTH for position in range(_SPARK_WIDTH + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
