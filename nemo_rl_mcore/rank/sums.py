"""What a train step adds up: sums of microbatches, then of ranks, divided once; and several steps taken together.

The division itself, a sum by the count of its kind, is `losses.base.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossSums, LossType, MetricKind, MetricSum, divide, valid_counts

# The counts travel with the metrics, in the same collective.
_VALID_SEQS, _VALID_TOKS = "global_valid_seqs", "global_valid_toks"

EXTREMA = frozenset((MetricKind.MIN, MetricKind.MAX))
# What a step without that metric adds to several steps together: nothing.
_NEUTRAL = {MetricKind.MIN: float("inf"), MetricKind.MAX: float("-inf")}


Gather = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's numbers, fp64 [N], to those of all ranks, [ranks, N]."""


@dataclass(frozen=True)
class StepTotals:
    """One step's sums over all data-parallel ranks: counts of valid sequences and tokens, metrics already divided.

    moe_metrics, mtp_metrics: the losses of the model's own layers, for a model with experts or prediction layers.
    row_table: of the rows of this data-parallel rank alone, in any order; see `LossSums`.
    """

    valid_seqs: float
    valid_toks: float
    metrics: Mapping[str, float]
    kinds: Mapping[str, MetricKind]
    moe_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    mtp_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    row_table: torch.Tensor | None = None

    def denominator(self, loss_type: LossType) -> float:
        """Return how many tokens or sequences the loss is a mean over."""
        return self.valid_toks if loss_type is LossType.TOKEN_LEVEL else self.valid_seqs


@dataclass
class LocalSums:
    """The sums of this rank's microbatches so far, on the device; nothing waits for it before `reduce`."""

    parts: list[dict[str, MetricSum]] = field(default_factory=list[dict[str, MetricSum]])
    row_tables: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @classmethod
    def of(cls, sums: LossSums, microbatch: BatchedDataDict) -> LocalSums:
        """Return the sums of one microbatch, with its counts."""
        (counts,) = cls.counts(microbatch).parts
        return cls([sums.metrics | counts], [] if sums.row_table is None else [sums.row_table])

    @classmethod
    def counts(cls, rows: BatchedDataDict) -> LocalSums:
        """Return the counts of rows alone, which their masks tell before any forward pass."""
        seqs, toks = valid_counts(rows)
        return cls(
            [
                {
                    _VALID_SEQS: MetricSum(seqs, MetricKind.NONE),
                    _VALID_TOKS: MetricSum(toks, MetricKind.NONE),
                }
            ]
        )

    def add(self, other: LocalSums) -> None:
        """Take in further microbatches of this rank."""
        self.parts.extend(other.parts)
        self.row_tables.extend(other.row_tables)

    def reduce(self, gather: Gather) -> StepTotals:
        """Sum over ranks; the one place where a step's metrics wait for the device. A step without a chunk is all 0.

        All ranks have added equally many chunks, or none: see `TrainStepBackend.called_together`.
        """
        if not self.parts:
            return StepTotals(0.0, 0.0, {"loss": 0.0}, {"loss": MetricKind.TOKENS})
        totals = reduce_metrics(combine_metrics(self.parts), gather)
        seqs, toks = (float(totals.pop(name).value) for name in (_VALID_SEQS, _VALID_TOKS))
        kinds = {name: metric.kind for name, metric in totals.items()}
        row_table = torch.cat(self.row_tables).cpu() if self.row_tables else None
        return StepTotals(seqs, toks, divide(totals, seqs, toks), kinds, row_table=row_table)


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


def reduce_metrics(sums: Mapping[str, MetricSum], gather: Gather) -> dict[str, MetricSum]:
    """Return the metrics of all ranks together, each value a 0-d fp64 tensor.

    Every rank passes the same names and kinds, in any order; `gather` is called once, for sums and extrema together.
    Further counts (valid sequences and tokens) may ride along as metrics of kind NONE.
    """
    if not sums:
        return {}
    names = sorted(sums)
    of_ranks = gather(torch.stack([sums[name].value.to(torch.float64) for name in names]))
    total, least, most = of_ranks.sum(0), of_ranks.amin(0), of_ranks.amax(0)
    place = {name: number for number, name in enumerate(names)}
    extrema = {MetricKind.MIN: least, MetricKind.MAX: most}
    return {
        name: MetricSum(extrema.get(metric.kind, total)[place[name]], metric.kind)
        for name, metric in sums.items()
    }


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


def neutral_value(kind: MetricKind) -> float:
    """Return the value that changes nothing when steps are combined."""
    return _NEUTRAL.get(kind, 0.0)
