"""Losses and metrics of microbatches add up to those of the batch; only the whole is divided."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from nemo_rl_mcore.losses.base import (
    Count,
    MetricKind,
    MetricSum,
    denominator,
    gradient_kind,
    normalize,
    valid_counts,
)

__all__ = ["combine", "combine_metrics", "denominator", "gradient_kind", "normalize_metrics", "valid_counts"]


def combine(parts: Sequence[MetricSum]) -> MetricSum:
    """Return the metric of the union of parts: extrema by minimum and maximum, all else by addition.

    The value is fp64. Nothing is averaged, and the device is not waited for.
    Raises ValueError for no part or differing kinds.
    """
    kinds = {part.kind for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"metrics to combine must have one kind, got {sorted(kind.value for kind in kinds)}")
    (kind,) = kinds
    values = torch.stack([part.value.to(torch.float64) for part in parts])
    if kind is MetricKind.MIN:
        return MetricSum(values.amin(), kind)
    if kind is MetricKind.MAX:
        return MetricSum(values.amax(), kind)
    return MetricSum(values.sum(), kind)


def combine_metrics(parts: Iterable[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Return, per name, the metric of the union of microbatches; a microbatch may lack a metric."""
    grouped: dict[str, list[MetricSum]] = {}
    for part in parts:
        for name, metric in part.items():
            grouped.setdefault(name, []).append(metric)
    return {name: combine(metrics) for name, metrics in grouped.items()}


def normalize_metrics(
    sums: Mapping[str, MetricSum], global_valid_seqs: Count, global_valid_toks: Count
) -> dict[str, torch.Tensor]:
    """Return each metric divided by the global count of its kind; sums and extrema stay as they are."""
    return {
        name: normalize(metric.value, metric.kind, global_valid_seqs, global_valid_toks)
        for name, metric in sums.items()
    }
