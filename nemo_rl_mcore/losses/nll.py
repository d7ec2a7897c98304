"""The negative log-likelihood of the tokens to train on."""

from collections.abc import Mapping

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import NLLLossConfig
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.losses.base import (
    LossSums,
    LossType,
    Masks,
    MetricKind,
    MetricSum,
    TokenLossFunction,
    TokenOutputs,
)


class NLLLossFn(TokenLossFunction):
    """Minus the mean log-probability over the valid tokens."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(
        self, cfg: NLLLossConfig | Mapping[str, object] | None = None, use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(NLLLossConfig, cfg or NLLLossConfig())
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def sums(self, outputs: TokenOutputs, data: BatchedDataDict) -> LossSums:
        """Return the un-normalised loss and metrics."""
        masks = Masks.of(data, outputs.logprobs.dtype)
        loss = -masks.token_sum(masks.keep(outputs.logprobs, "logprobs"))
        return LossSums(
            loss,
            {
                "loss": MetricSum(loss.detach(), MetricKind.TOKENS),
                "num_unmasked_tokens": MetricSum(masks.valid.sum(), MetricKind.NONE),
                "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
            },
        )
