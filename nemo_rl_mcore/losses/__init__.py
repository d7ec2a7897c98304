"""Loss functions: sums over a batch, each with a named denominator, divided once."""

from nemo_rl_mcore.losses.answers import DPOLossFn, NLLLossFn
from nemo_rl_mcore.losses.base import (
    DistillationOutputs,
    LossFunction,
    LossInputType,
    LossSums,
    LossType,
    MetricKind,
    MetricSum,
    TokenLossFunction,
    TokenOutputs,
    TopKLogprobs,
    ValueOutputs,
)
from nemo_rl_mcore.losses.clipped_pg import ClippedPGLossFn
from nemo_rl_mcore.losses.custom import check_losses, make_loss
from nemo_rl_mcore.losses.distillation import DistillationLossFn
from nemo_rl_mcore.losses.value import MseValueLossFn

__all__ = [
    "ClippedPGLossFn",
    "DPOLossFn",
    "DistillationLossFn",
    "DistillationOutputs",
    "LossFunction",
    "LossInputType",
    "LossSums",
    "LossType",
    "MetricKind",
    "MetricSum",
    "MseValueLossFn",
    "NLLLossFn",
    "TokenLossFunction",
    "TokenOutputs",
    "TopKLogprobs",
    "ValueOutputs",
    "check_losses",
    "make_loss",
]
