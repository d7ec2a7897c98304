"""What a train step adds up: metric sums and counts of a rank's microbatches, and the totals over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossSums, LossType, MetricKind, MetricSum, valid_counts
from nemo_rl_mcore.training.metrics import AllReduce, finalize_metrics, reduce_metrics
from nemo_rl_mcore.training.normalization import combine_metrics

# The counts travel with the metrics, in the same collective.
_VALID_SEQS, _VALID_TOKS = "global_valid_seqs", "global_valid_toks"


@dataclass(frozen=True)
class StepTotals:
    """One step's sums over all data-parallel ranks: counts of valid rows and tokens, metrics already divided."""

    valid_seqs: float
    valid_toks: float
    metrics: Mapping[str, float]

    def denominator(self, loss_type: LossType) -> float:
        """How many tokens or sequences the loss is a mean over."""
        return self.valid_toks if loss_type is LossType.TOKEN_LEVEL else self.valid_seqs


@dataclass
class LocalSums:
    """The sums of this rank's microbatches so far, on the device; nothing waits for it before `reduce`."""

    parts: list[dict[str, MetricSum]] = field(default_factory=list[dict[str, MetricSum]])

    @classmethod
    def of(cls, sums: LossSums, microbatch: BatchedDataDict) -> LocalSums:
        """The sums of one microbatch, with its counts."""
        seqs, toks = valid_counts(microbatch)
        counts = {
            _VALID_SEQS: MetricSum(seqs, MetricKind.NONE),
            _VALID_TOKS: MetricSum(toks, MetricKind.NONE),
        }
        return cls([sums.metrics | counts])

    def add(self, other: LocalSums) -> None:
        """Take in further microbatches of this rank."""
        self.parts.extend(other.parts)

    def reduce(self, all_reduce: AllReduce) -> StepTotals:
        """Sum over ranks; the one place where a step's metrics wait for the device. A step without a chunk is all 0."""
        if not self.parts:
            return StepTotals(0.0, 0.0, {"loss": 0.0})
        totals = reduce_metrics(combine_metrics(self.parts), all_reduce)
        seqs, toks = (float(totals.pop(name).value) for name in (_VALID_SEQS, _VALID_TOKS))
        return StepTotals(seqs, toks, finalize_metrics(totals, seqs, toks))
