"""Sums of a train step: over microbatches, then over ranks, divided once at the end; and metrics of several steps.

`losses.base.divide` divides each sum by the count of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossSums, LossType, MetricKind, MetricSum, divide, valid_counts

# The counts are reduced together with the metrics, in one collective.
_VALID_SEQS, _VALID_TOKS = "global_valid_seqs", "global_valid_toks"

EXTREMA = frozenset((MetricKind.MIN, MetricKind.MAX))
NEUTRAL = {
    **dict.fromkeys(MetricKind, 0.0),
    MetricKind.MIN: float("inf"),
    MetricKind.MAX: float("-inf"),
}
"""The neutral value of each kind in `combine_steps`, for a step without that metric."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Gathers this rank's numbers, fp64 [N], to those of all ranks, [ranks, N]."""


@dataclass(frozen=True)
class StepTotals:
    """One step's sums over all data-parallel ranks: counts of valid sequences and tokens, metrics already divided.

    moe_metrics, mtp_metrics: losses of the model's own layers. row_table: this rank's rows only, see `LossSums`.
    """

    valid_seqs: float
    valid_toks: float
    metrics: Mapping[str, float]
    kinds: Mapping[str, MetricKind]
    moe_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    mtp_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    row_table: torch.Tensor | None = None

    def denominator(self, loss_type: LossType) -> float:
        """Return the number of tokens or sequences that the loss is averaged over."""
        return self.valid_toks if loss_type is LossType.TOKEN_LEVEL else self.valid_seqs


@dataclass
class LocalSums:
    """Sums over this rank's microbatches so far, on the device, which is not synchronized before `reduce`."""

    parts: list[dict[str, MetricSum]] = field(default_factory=list[dict[str, MetricSum]])
    row_tables: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @classmethod
    def of(cls, sums: LossSums | None, rows: BatchedDataDict) -> LocalSums:
        """Return the sums of a microbatch; None gives its counts only, which need no forward pass."""
        seqs, toks = valid_counts(rows)
        none = MetricKind.NONE
        counts = {_VALID_SEQS: MetricSum(seqs, none), _VALID_TOKS: MetricSum(toks, none)}
        if sums is None:
            return cls([counts])
        row_tables = [] if sums.row_table is None else [sums.row_table]
        return cls([sums.metrics | counts], row_tables)

    def add(self, other: LocalSums) -> None:
        self.parts.extend(other.parts)
        self.row_tables.extend(other.row_tables)

    def reduce(self, gather: Gather) -> StepTotals:
        """Sum over ranks, which have added equally many chunks; the only synchronization with the device in a step."""
        if not self.parts:
            return StepTotals(0.0, 0.0, {"loss": 0.0}, {"loss": MetricKind.TOKENS})
        totals = reduce_metrics(combine_metrics(self.parts), gather)
        seqs, toks = (float(totals.pop(name).value) for name in (_VALID_SEQS, _VALID_TOKS))
        kinds = {name: metric.kind for name, metric in totals.items()}
        row_table = torch.cat(self.row_tables).cpu() if self.row_tables else None
        return StepTotals(seqs, toks, divide(totals, seqs, toks), kinds, row_table=row_table)


def combine_metrics(parts: Iterable[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Combine the metrics of microbatches by name; a microbatch may lack some.

    Extrema combine by minimum and maximum, others by addition; ValueError for a metric of several kinds.
    """
    grouped: dict[str, list[MetricSum]] = {}
    for part in parts:
        for name, metric in part.items():
            grouped.setdefault(name, []).append(metric)
    combined: dict[str, MetricSum] = {}
    for name, metrics in grouped.items():
        kind, *others = {metric.kind for metric in metrics}
        if others:
            kinds = sorted(each.value for each in (kind, *others))
            raise ValueError(f"metrics to combine must have one kind, got {kinds}")
        values = torch.stack([metric.value.to(torch.float64) for metric in metrics])
        reduce = {MetricKind.MIN: torch.amin, MetricKind.MAX: torch.amax}.get(kind, torch.sum)
        combined[name] = MetricSum(reduce(values), kind)
    return combined


def reduce_metrics(sums: Mapping[str, MetricSum], gather: Gather) -> dict[str, MetricSum]:
    """Combine the metrics of all ranks, by one `gather`; each value is a 0-d fp64 tensor.

    Every rank passes the same names and kinds, in any order; counts may be among them, of kind NONE.
    """
    if not sums:
        return {}
    names = sorted(sums)
    of_ranks = gather(torch.stack([sums[name].value.to(torch.float64) for name in names]))
    total = of_ranks.sum(0)
    extrema = {MetricKind.MIN: of_ranks.amin(0), MetricKind.MAX: of_ranks.amax(0)}
    reduced = {
        name: extrema.get(sums[name].kind, total)[place]  # by name, since orders may differ
        for place, name in enumerate(names)
    }
    return {name: MetricSum(reduced[name], metric.kind) for name, metric in sums.items()}


def combine_steps(
    kind: MetricKind, values: Sequence[float], valid_seqs: Sequence[float], valid_toks: Sequence[float]
) -> float:
    if kind is MetricKind.MIN:
        return min(values)
    if kind is MetricKind.MAX:
        return max(values)
    if kind is MetricKind.NONE:
        return sum(values)
    weights = valid_toks if kind is MetricKind.TOKENS else valid_seqs
    weighted = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return weighted / (sum(weights) or 1.0)
