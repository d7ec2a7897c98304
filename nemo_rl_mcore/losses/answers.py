"""Losses of given answers: negative log-likelihood, and DPO, https://arxiv.org/abs/2305.18290.

In DPO rows interleave pairs: even rows are chosen answers, odd rows the rejected ones. P = B / 2 pairs.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import DPOLossConfig, NLLLossConfig
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.columns import Column
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses.base import (
    LossSums,
    LossType,
    Masks,
    MetricKind,
    MetricSum,
    TokenLossFunction,
    TokenOutputs,
    require,
)


class NLLLossFn(TokenLossFunction):
    """The negative mean log-probability of the valid tokens."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(
        self, cfg: NLLLossConfig | Mapping[str, object] | None = None, use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(NLLLossConfig, cfg or NLLLossConfig())
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def sums(self, outputs: TokenOutputs, data: BatchedDataDict) -> LossSums:
        masks = Masks.of(data, outputs.logprobs.dtype)
        loss = -masks.token_sum(masks.keep(outputs.logprobs, "logprobs"))
        metrics = {
            "loss": MetricSum(loss.detach(), MetricKind.TOKENS),
            "num_unmasked_tokens": MetricSum(masks.valid.sum(), MetricKind.NONE),
            "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
        }
        return LossSums(loss, metrics)


_ROWS_PER_PAIR = 2
_REFERENCE = Column("reference_policy_logprobs", "DPO", of_next_token=True)


class DPOLossFn(TokenLossFunction):
    """The negative log-sigmoid of the margin between the chosen and the rejected answer's rewards.

    Unlike elsewhere `reference_policy_logprobs` [B,S] arrives rolled left by one: column i is log p of token i+1.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_sample = _ROWS_PER_PAIR
    own_columns = (_REFERENCE,)

    def __init__(
        self, cfg: DPOLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(DPOLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def sums(self, outputs: TokenOutputs, data: BatchedDataDict) -> LossSums:
        """Return the un-normalised loss and metrics; ValueError for an odd number of rows."""
        given = require(data, "sample_mask", "every loss")
        if len(given) % _ROWS_PER_PAIR:
            raise RefusedError(
                f"DPO reads rows as (chosen, rejected) pairs, and the batch has {len(given)} rows",
                code="rows-per-sample",
            )
        # The chosen row's mask counts for both rows of a pair.
        of_pairs = given[::_ROWS_PER_PAIR].repeat_interleave(_ROWS_PER_PAIR)
        masks = Masks.of(BatchedDataDict(data, sample_mask=of_pairs), outputs.logprobs.dtype)
        logprobs = masks.keep(outputs.logprobs, "logprobs")
        reference = masks.keep(require(data, _REFERENCE.key, _REFERENCE.needed_by)[:, :-1], _REFERENCE.key)
        rewards_B = _of_rows(logprobs - reference, masks, mean=self.cfg.preference_average_log_probs)
        chosen_P, rejected_P = rewards_B[::2], rewards_B[1::2]
        kept_P = masks.samples[::2]
        margin_P = self.cfg.reference_policy_kl_penalty * (chosen_P - rejected_P)
        preference = _over_pairs(-logsigmoid(margin_P), kept_P)
        sft = logprobs.new_zeros(())
        if self.cfg.sft_loss_weight != 0:
            likelihood_B = _of_rows(-logprobs, masks, mean=self.cfg.sft_average_log_probs)
            sft = _over_pairs(likelihood_B[::2], kept_P)
        loss = self.cfg.preference_loss_weight * preference + self.cfg.sft_loss_weight * sft
        per_pair = {
            "loss": loss,
            "preference_loss": preference,
            "sft_loss": sft,
            "accuracy": _over_pairs((chosen_P > rejected_P).to(kept_P.dtype), kept_P),
            "rewards_chosen_mean": _over_pairs(chosen_P, kept_P),
            "rewards_rejected_mean": _over_pairs(rejected_P, kept_P),
        }
        metrics = {name: MetricSum(value.detach(), MetricKind.SEQUENCES) for name, value in per_pair.items()}
        metrics["num_valid_samples"] = MetricSum(kept_P.sum(), MetricKind.NONE)
        return LossSums(loss, metrics)


def _of_rows(values: Tensor, masks: Masks, *, mean: bool) -> Tensor:
    if mean:
        return masks.sequence_mean(values)
    return (values * masks.tokens).sum(dim=-1)


def _over_pairs(values_P: Tensor, kept_P: Tensor) -> Tensor:
    """Return twice the sum over the kept pairs, because it is divided by the valid rows, two for each pair."""
    return _ROWS_PER_PAIR * (values_P * kept_P).sum()
