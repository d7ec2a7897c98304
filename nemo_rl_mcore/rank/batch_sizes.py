"""The rows of an optimizer step and of a microbatch; recipes count samples, which a loss may make of several rows.

An episode of several rows counts as one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import batched

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses.base import LossFunction, LossInputType


@dataclass(frozen=True)
class BatchSizes:
    """Rows of an optimizer step over all data-parallel ranks, and of a microbatch; whole samples both."""

    gbs: int
    mbs: int
    rows_per_sample: int

    @classmethod
    def of(cls, policy: PolicyConfig, loss_fn: LossFunction, gbs: int | None, mbs: int | None) -> BatchSizes:
        """Return the sizes given in rows, or those of the config, which are in samples.

        Raises ValueError for a size that is no positive multiple of the rows of a sample, and for a loss that expects
        the fused head of a model without one.
        """
        _require_its_head(policy, loss_fn)
        rows = loss_fn.rows_per_sample
        gbs = policy.train_global_batch_size * rows if gbs is None else gbs
        mbs = policy.train_micro_batch_size * rows if mbs is None else mbs
        for name, size in (("gbs", gbs), ("mbs", mbs)):
            if size < 1 or size % rows:
                raise RefusedError(
                    f"{name} {size} is no positive multiple of the {rows} rows of a sample of "
                    f"{type(loss_fn).__name__}",
                    code="rows-per-sample",
                )
        return cls(gbs, mbs, rows)

    def of_shard(self, shards: int) -> int:
        """Return a step's rows in each of so many equal shards; ValueError when that would part a sample."""
        if self.gbs % (shards * self.rows_per_sample):
            raise RefusedError(
                f"gbs {self.gbs} does not divide into {shards} data-parallel ranks, {self.rows_per_sample} "
                "rows a sample",
                code="data-parallel-split",
            )
        return self.gbs // shards

    def steps(self, data: BatchedDataDict, shards: int = 1) -> list[BatchedDataDict]:
        """Return the rows of each step, of which `data` holds one of so many equal shards.

        Raises ValueError when that leaves some rows, or there is none.
        """
        rows, samples = self.of_shard(shards), data.samples(self.rows_per_sample)
        size, unit = len(samples) * self.rows_per_sample, "episodes" if EPISODE in data else "rows"
        if not size or size % rows:
            raise RefusedError(
                f"{size} {unit} are no multiple of the {rows} that one step takes (gbs {self.gbs} over {shards} "
                "data-parallel ranks)",
                code="rows-per-step",
            )
        steps = batched(samples, rows // self.rows_per_sample)
        return [data.slice(step[0].start, step[-1].stop) for step in steps]


def _require_its_head(policy: PolicyConfig, loss_fn: LossFunction) -> None:
    """Check the loss's own switches: how a token's log-probability is computed is the model's matter."""
    fused = policy.megatron_cfg.use_fused_linear_logprobs
    if loss_fn.use_fused_linear_logprobs and not fused and loss_fn.input_type is LossInputType.LOGPROB:
        raise RefusedError(
            f"{type(loss_fn).__name__} was made with use_fused_linear_logprobs=True, and this model computes unfused: "
            "set policy.megatron_cfg.use_fused_linear_logprobs: true, or leave the argument out",
            code="fused-loss",
        )
