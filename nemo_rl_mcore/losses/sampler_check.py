"""How far the weights that train are from those that drew the answers, summed up in the training pass.

What `algorithms.mismatch` makes of these sums is what it makes of prev_logprobs, where a pass before training gives
them. Shapes: [B,S-1] in the next-token frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.losses.base import Masks, MetricKind, MetricSum, masked_sum
from nemo_rl_mcore.losses.kl import kl_estimate, log_ratio_estimate

ON_POLICY = "drawn_on_policy"
"""Column: the rows [B] of which the weights that train have drawn all tokens; left out, they have drawn every row."""
_PREFIX = "sampler/"


@dataclass(frozen=True)
class SamplerCheck:
    """Asks a loss for the sums, and to take the training pass's own log-probabilities for those before training.

    threshold: of the mean of exp|generation - training| over a response's tokens; None counts no response above it.
    """

    threshold: float | None = None

    def sums(
        self,
        masks: Masks,
        previous: Tensor,
        generation: Tensor,
        kl_type: KLType,
        on_policy_B: Tensor | None,
    ) -> dict[str, MetricSum]:
        """The fields of `SamplerSums` as metrics, all fp64. previous, generation: 0 where no token counts."""
        rows_B = torch.ones_like(masks.samples) if on_policy_B is None else on_policy_B
        checked = (masks.valid * rows_B[:, None]).double()
        generated, computed = generation.double(), previous.double()
        error = torch.exp((generated - computed).abs())
        log_ratio = computed - generated
        ratio = log_ratio.exp()
        values = {
            "tokens": checked.sum(),
            "error": masked_sum(error, checked),
            "divergence": masked_sum(kl_estimate(generated, computed, kl_type), checked),
            **self._of_responses(masks, error, checked),
            "trained_tokens": masks.valid.double().sum(),
            "ratio": masks.token_sum(ratio),
            "ratio_squares": masks.token_sum(ratio.square()),
            "ratio_max": masks.maximum(ratio),
            "behaviour_kl": masks.token_sum(log_ratio_estimate(log_ratio, "k3")),
        }
        kinds = {"largest": MetricKind.MAX, "ratio_max": MetricKind.MAX}
        return {
            _PREFIX + name: MetricSum(value, kinds.get(name, MetricKind.NONE))
            for name, value in values.items()
        }

    def _of_responses(self, masks: Masks, error: Tensor, checked: Tensor) -> dict[str, Tensor]:
        tokens_B = masks.over_sequence(checked.sum(dim=-1))
        mean_B = masks.over_sequence(masked_sum(error, checked, dim=-1)) / tokens_B.clamp(min=1)
        mean_B = torch.where(tokens_B > 0, mean_B, 1.0)
        largest = mean_B.max() if len(mean_B) else mean_B.new_ones(())
        if self.threshold is None:
            return {"largest": largest, "above": largest.new_zeros(())}
        return {"largest": largest, "above": (~(mean_B <= self.threshold) * masks.sequences).sum()}


@dataclass(frozen=True)
class SamplerSums:
    """The sums of a step.

    Over the tokens of on-policy rows: their number, exp|generation - training|, the divergence; of the responses among
    them the largest mean, and how many are above the threshold. Over all trained tokens: their number, the ratio of
    training to generation, its squares, its maximum, and the k3 estimate of their divergence.
    """

    tokens: float
    error: float
    divergence: float
    largest: float
    above: float
    trained_tokens: float
    ratio: float
    ratio_squares: float
    ratio_max: float
    behaviour_kl: float

    @classmethod
    def taken_from(cls, result: Mapping[str, Any]) -> Self:
        """The sums of a result of one optimizer step, which then has them no more: they are no metrics of a step."""
        per_step, kinds = result["all_mb_metrics"], result["metric_kinds"]
        names = [field.name for field in fields(cls)]
        for name in names:
            kinds.pop(_PREFIX + name, None)
        # A step without a chunk has none.
        return cls(**{name: sum(per_step.pop(_PREFIX + name, [0.0])) for name in names})
