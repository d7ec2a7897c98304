"""What a train step adds up: metric sums and counts of a rank's microbatches, and the totals over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossSums, LossType, MetricKind, MetricSum, valid_counts
from nemo_rl_mcore.training.metrics import AllReduce, ReduceKind, finalize_metrics, reduce_metrics
from nemo_rl_mcore.training.normalization import combine_metrics

# The counts travel with the metrics, in the same collective.
_VALID_SEQS, _VALID_TOKS = "global_valid_seqs", "global_valid_toks"


@dataclass(frozen=True)
class StepTotals:
    """One step's sums over all data-parallel ranks: counts of valid rows and tokens, metrics already divided.

    moe_metrics, mtp_metrics: the losses of the model's own layers, for a model with experts or prediction layers.
    """

    valid_seqs: float
    valid_toks: float
    metrics: Mapping[str, float]
    kinds: Mapping[str, MetricKind]
    moe_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    mtp_metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def denominator(self, loss_type: LossType) -> float:
        """How many tokens or sequences the loss is a mean over."""
        return self.valid_toks if loss_type is LossType.TOKEN_LEVEL else self.valid_seqs


class UnequalChunksError(RuntimeError):
    """The data-parallel ranks added different numbers of chunks to a step."""


@dataclass
class LocalSums:
    """The sums of this rank's microbatches so far, on the device; nothing waits for it before `reduce`."""

    parts: list[dict[str, MetricSum]] = field(default_factory=list[dict[str, MetricSum]])
    chunks: int = 0

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

    def add_chunk(self, other: LocalSums) -> None:
        """Take in the microbatches of one more chunk."""
        self.add(other)
        self.chunks += 1

    def reduce(self, all_reduce: AllReduce) -> StepTotals:
        """Sum over ranks; the one place where a step's metrics wait for the device. A step without a chunk is all 0.

        Raises UnequalChunksError on every rank when the ranks added different numbers of chunks.
        """
        self._require_equal_chunks(all_reduce)
        if not self.parts:
            return StepTotals(0.0, 0.0, {"loss": 0.0}, {"loss": MetricKind.TOKENS})
        totals = reduce_metrics(combine_metrics(self.parts), all_reduce)
        seqs, toks = (float(totals.pop(name).value) for name in (_VALID_SEQS, _VALID_TOKS))
        kinds = {name: metric.kind for name, metric in totals.items()}
        return StepTotals(seqs, toks, finalize_metrics(totals, seqs, toks), kinds)

    def _require_equal_chunks(self, all_reduce: AllReduce) -> None:
        # Without this a rank that has nothing to add would skip the collectives that its peers wait in, and they
        # would pair with those of its next step.
        extremes = torch.tensor([self.chunks, -self.chunks], dtype=torch.float64)
        all_reduce(extremes, ReduceKind.MAX)
        most, fewest = int(extremes[0]), -int(extremes[1])
        if most != fewest:
            raise UnequalChunksError(
                f"the data-parallel ranks added {fewest} to {most} chunks to this step; send every rank each chunk, "
                "with no rows where it has none"
            )
