"""Building the loss of a config section: a built-in class, or a custom one in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_rl_mcore.config.custom_code import build
from nemo_rl_mcore.config.loss import (
    ClippedPGLossConfig,
    CustomLossConfig,
    DistillationLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses.answers import NLLLossFn
from nemo_rl_mcore.losses.base import LossFunction, LossInputType
from nemo_rl_mcore.losses.clipped_pg import ClippedPGLossFn
from nemo_rl_mcore.losses.distillation import DistillationLossFn
from nemo_rl_mcore.losses.value import MseValueLossFn

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

_STANDARD: dict[type[CustomLossConfig], tuple[Callable[[Any, bool], LossFunction], LossInputType]] = {
    ClippedPGLossConfig: (ClippedPGLossFn, LossInputType.LOGPROB),
    NLLLossConfig: (NLLLossFn, LossInputType.LOGPROB),
    DistillationLossConfig: (DistillationLossFn, LossInputType.DISTILLATION),
    MseValueLossConfig: (MseValueLossFn, LossInputType.VALUE),
}


def make_loss(
    cfg: CustomLossConfig, use_fused_linear_logprobs: bool = False, *, section: str = "loss_fn"
) -> LossFunction:
    """Build a section's loss, or the custom class that it names, with the section and the flag (and its `args`).

    Raises ValueError, naming the key, if the class does not exist or is not a loss of the same inputs.
    """
    standard, inputs = _STANDARD[type(cfg)]
    if cfg.type is None:
        return standard(cfg, use_fused_linear_logprobs)
    key = f"{section}.type"
    loss = build(cfg.type, key, cfg.args, cfg, use_fused_linear_logprobs, needs=("sums",))
    if not isinstance(loss, LossFunction):
        raise RefusedError(
            f"{key}: {cfg.type} is not a subclass of nemo_rl_mcore.losses.LossFunction", code="no-loss"
        )
    if lacking := [name for name in ("loss_type", "input_type") if not hasattr(loss, name)]:
        raise RefusedError(f"{key}: {cfg.type} does not define {' and '.join(lacking)}", code="no-loss")
    if loss.input_type is not inputs:
        raise RefusedError(
            f"{key}: {cfg.type} reads {loss.input_type.name}, and is given {inputs.name} here",
            code="loss-inputs",
        )
    loss.custom_name = f"{key}: {cfg.type}"
    return loss


def check_losses(config: RunConfig) -> None:
    """Build every loss of a run once, to raise ValueError early, also for samples of rows that no step can have."""
    for section, cfg in config.losses.items():
        rows = make_loss(cfg, section=section).rows_per_sample
        if rows == 1:
            continue
        where = f"{section}.type: {cfg.type} reads {rows} rows together"
        if config.algorithm == "ppo":
            raise RefusedError(
                f"{where}, and each of ppo.ppo_epochs shuffles single rows; use another loss",
                code="rows-per-sample",
            )
        batch = config.policy.train_global_batch_size
        if config.samples_per_step % (rows * batch):
            raise RefusedError(
                f"{where}, so that an optimizer step takes {rows} times policy.train_global_batch_size: {batch} rows, "
                f"and a step has {config.samples_per_step}; lower policy.train_global_batch_size",
                code="rows-per-step",
            )
