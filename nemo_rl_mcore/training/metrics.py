"""Metrics across ranks: one collective per way of combining, one wait for the device per step."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from nemo_rl_mcore.losses.base import Count, MetricKind, MetricSum, to_floats
from nemo_rl_mcore.training.normalization import normalize_metrics


class ReduceKind(Enum):
    """How a packed tensor combines over ranks."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


AllReduce = Callable[[Tensor, ReduceKind], None]
"""Reduces a 1-d fp64 tensor over ranks, in place."""


def reduce_metrics(sums: Mapping[str, MetricSum], all_reduce: AllReduce) -> dict[str, MetricSum]:
    """Return the metrics of all ranks together, each value a 0-d fp64 tensor.

    Every rank passes the same names and kinds, in any order; `all_reduce` is called at most once per
    ReduceKind. Further counts (valid sequences and tokens) may ride along as metrics of kind NONE.
    """
    reduced: dict[str, MetricSum] = {}
    for reduce_kind in ReduceKind:
        names = sorted(name for name, metric in sums.items() if _reduction(metric.kind) is reduce_kind)
        if not names:
            continue
        packed = torch.stack([sums[name].value.to(torch.float64) for name in names])
        all_reduce(packed, reduce_kind)
        for name, value in zip(names, packed.unbind(), strict=True):
            reduced[name] = MetricSum(value, sums[name].kind)
    return {name: reduced[name] for name in sums}


def finalize_metrics(
    sums: Mapping[str, MetricSum], global_valid_seqs: Count, global_valid_toks: Count
) -> dict[str, float]:
    """Return the reported numbers: sums divided once by the global counts; the extrema of nothing are infinite."""
    return to_floats(normalize_metrics(sums, global_valid_seqs, global_valid_toks))


EXTREMA = frozenset((MetricKind.MIN, MetricKind.MAX))
# What a step without that metric adds to several steps together: nothing.
_NEUTRAL = {MetricKind.MIN: float("inf"), MetricKind.MAX: float("-inf")}


def neutral_value(kind: MetricKind) -> float:
    """Return the value that changes nothing when steps are combined."""
    return _NEUTRAL.get(kind, 0.0)


def combine_steps(
    kind: MetricKind, values: Sequence[float], valid_seqs: Sequence[float], valid_toks: Sequence[float]
) -> float:
    """Return a metric of several optimizer steps as if they had been one: means are weighted by their counts."""
    if kind is MetricKind.MIN:
        return min(values)
    if kind is MetricKind.MAX:
        return max(values)
    if kind is MetricKind.NONE:
        return sum(values)
    weights = valid_toks if kind is MetricKind.TOKENS else valid_seqs
    weighted = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return weighted / (sum(weights) or 1.0)


def _reduction(kind: MetricKind) -> ReduceKind:
    if kind is MetricKind.MIN:
        return ReduceKind.MIN
    return ReduceKind.MAX if kind is MetricKind.MAX else ReduceKind.SUM
