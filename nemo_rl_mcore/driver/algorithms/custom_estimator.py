"""Advantage estimators of the user's own: a class that a recipe names in `adv_estimator.type`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.driver.algorithms.advantages import (
    AdvantageEstimator,
    GeneralizedAdvantageEstimator,
    WithoutCritic,
    make_advantage_estimator,
)
from nemo_rl_mcore.errors import CustomCodeError


class ComputesAdvantage(Protocol):
    """What the class has to have; its signature is that of the built-in estimators."""

    def compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
        """See `WithoutCritic.compute_advantage`, and for PPO `GeneralizedAdvantageEstimator.compute_advantage`."""
        ...


def estimator_of(config: RunConfig, loss_cfg: ClippedPGLossConfig) -> AdvantageEstimator:
    """Return the advantage estimator of a recipe: the one that it names, or a class of the user's own.

    The class is called with its section and that of the loss, as built-in ones are, then with `args`. It is built again
    in every step, so that a run can resume: nothing may be kept in it. Raises ValueError, naming the key, for a class
    that is not there or has no `compute_advantage`.
    """
    cfg: AdvantageEstimatorConfig = getattr(config.loop, "adv_estimator")  # noqa: B009
    if cfg.type is None:
        return make_advantage_estimator(cfg, loss_cfg)
    key = f"{config.algorithm}.adv_estimator.type"
    own = build(cfg.type, key, cfg.args, cfg, loss_cfg, needs=("compute_advantage",))
    kind = _OwnWithCritic if cfg.name == "gae" else _OwnWithoutCritic
    return kind(cast("ComputesAdvantage", own), f"{key}: {cfg.type}.compute_advantage")


def check_estimator(config: RunConfig) -> None:
    """Build an estimator of the user's own, for the ValueError that `estimator_of` may raise."""
    if config.loop.estimator_type is not None:
        estimator_of(config, ClippedPGLossConfig())


class _OwnWithoutCritic(WithoutCritic):
    def __init__(self, own: ComputesAdvantage, name: str) -> None:
        self._own, self._name = own, name

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **logprobs: Any) -> Tensor:
        """Return what the user's class gives, which must be finite on the tokens of the mask."""
        with custom_code(self._name):
            given = self._own.compute_advantage(prompt_ids, rewards, mask, **logprobs)
        return _checked(self._name, [given], mask)[0]


class _OwnWithCritic(GeneralizedAdvantageEstimator):
    def __init__(self, own: ComputesAdvantage, name: str) -> None:
        self._own, self._name = own, name

    def compute_advantage(
        self, prompt_ids: Tensor | None, rewards: Tensor, mask: Tensor, **columns: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what the user's class gives: advantages and returns."""
        with custom_code(self._name):
            given = self._own.compute_advantage(prompt_ids, rewards, mask, **columns)
        if not isinstance(given, tuple) or len(cast("tuple[object, ...]", given)) != 2:
            raise CustomCodeError(
                f"{self._name} gave no pair of advantages and returns", code="estimator-result"
            )
        advantages, returns = _checked(self._name, cast("tuple[object, ...]", given), mask)
        return advantages, returns


def _checked(name: str, given: Sequence[object], mask: Tensor) -> list[Tensor]:
    """Return tensors [B,S] that are finite where the mask counts."""
    for one in given:
        if not isinstance(one, Tensor) or one.shape != mask.shape:
            found = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
            raise CustomCodeError(
                f"{name} gave {found} in place of a tensor {tuple(mask.shape)}", code="estimator-result"
            )
        if not torch.isfinite(one[mask != 0]).all():
            raise CustomCodeError(f"{name} gave a number that is not finite", code="estimator-result")
    return [cast("Tensor", one) for one in given]
