"""Loss functions: sums over a batch with a named denominator, divided once."""

from nemo_rl_mcore.losses.base import (
    LossFunction,
    LossInputType,
    LossSums,
    LossType,
    MetricKind,
    MetricSum,
    TokenOutputs,
)
from nemo_rl_mcore.losses.clipped_pg import ClippedPGLossFn
from nemo_rl_mcore.losses.nll import NLLLossFn

__all__ = [
    "ClippedPGLossFn",
    "LossFunction",
    "LossInputType",
    "LossSums",
    "LossType",
    "MetricKind",
    "MetricSum",
    "NLLLossFn",
    "TokenOutputs",
]
