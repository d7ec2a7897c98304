"""The critic's regression onto the returns, clipped as in PPO, https://arxiv.org/abs/1707.06347.

Unlike next-token losses it reads all S columns: a value belongs to the state before its token.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import MseValueLossConfig
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.columns import Column, ColumnKind
from nemo_rl_mcore.losses.base import (
    Count,
    LossFunction,
    LossInputType,
    LossSums,
    LossType,
    Masks,
    MetricKind,
    MetricSum,
    ValueOutputs,
)


class MseValueLossFn(LossFunction):
    """Half the squared error of the values, or of the values clipped around the old ones, whichever is larger."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE

    def __init__(
        self, cfg: MseValueLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(MseValueLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.own_columns = [Column("returns", "the critic", ColumnKind.NUMBERS)]
        if self.cfg.cliprange is not None:
            needed_by = f"cliprange: {self.cfg.cliprange}"
            self.own_columns.append(Column("values", needed_by, ColumnKind.NUMBERS))

    def __call__(
        self, values: Tensor, data: BatchedDataDict, global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, float]]:
        return self.divide(self.sums(ValueOutputs(values), data), global_valid_seqs, global_valid_toks)

    def sums(self, outputs: ValueOutputs, data: BatchedDataDict) -> LossSums:
        masks = Masks.of(data, outputs.values.dtype, first_column=0)
        values = masks.keep(outputs.values, "values")
        given = {column.key: masks.read(data, column.key, column.needed_by) for column in self.own_columns}
        returns = given["returns"]
        error = (values - returns).square()
        worse = error
        if self.cfg.cliprange is not None:
            old = given["values"]
            held = torch.clamp(values, old - self.cfg.cliprange, old + self.cfg.cliprange)
            worse = torch.maximum(error, (held - returns).square())
        loss = 0.5 * self.cfg.scale * masks.token_sum(worse)
        real = torch.ones_like(masks.samples) if "input_lengths" not in data else data["input_lengths"] > 0
        # Rows of length 0 pad a microbatch.
        sequences = replace(masks, samples=real.to(masks.samples.dtype)).sequences.sum()
        with torch.no_grad():
            least, most = masks.extrema(values)
            metrics = {
                "vf_clipfrac": masks.token_metric((worse > error).to(values.dtype)),
                "returns_mean": masks.token_metric(returns),
                "values_mean": masks.token_metric(values),
                "returns_sq_mean": masks.token_metric(returns.square()),
                "residual_sq_mean": masks.token_metric(error),
                "loss": MetricSum(loss.detach(), MetricKind.TOKENS),
                "values_min": MetricSum(least, MetricKind.MIN),
                "values_max": MetricSum(most, MetricKind.MAX),
                "num_valid_samples": MetricSum(sequences, MetricKind.NONE),
            }
        return LossSums(loss, metrics)
