"""Configurations of the loops that learn from given answers: SFT and DPO."""

from collections.abc import Iterator
from typing import Literal

from nemo_rl_mcore.config.algorithm import AsyncSection, LoopConfig
from nemo_rl_mcore.config.asynchronous import AsyncRolloutsConfig
from nemo_rl_mcore.config.base import PositiveInt, Problem
from nemo_rl_mcore.config.loss import DPOLossConfig


class GivenRowsConfig(LoopConfig):
    """The loop of algorithms that learn from given rows, of which a sample is one, or a pair."""

    val_batches: Literal[-1] | PositiveInt = 1
    """Batches of held-out samples of which a validation takes the loss, at most as many as there are; -1 is all."""
    val_global_batch_size: PositiveInt | None = None
    """Samples of such a batch, the last of which may have fewer; null is policy.train_global_batch_size."""
    val_micro_batch_size: PositiveInt | None = None
    """Samples per forward pass of one rank there; null is policy.train_micro_batch_size."""


class SFTConfig(GivenRowsConfig):
    """Supervised fine-tuning: a step is policy.train_global_batch_size answers of the data set."""


class DPOConfig(GivenRowsConfig, DPOLossConfig):
    """Direct preference optimization: a step is policy.train_global_batch_size pairs. The loss has its keys here."""

    online: bool = False
    """Make the pairs: the best against the worst of several answers of the policy; false takes the data set's."""
    num_generations_per_prompt: PositiveInt | None = None
    """Answers that a pair is picked from; read when online."""
    async_dpo: AsyncSection = AsyncRolloutsConfig()
    """Asynchronous rollouts (ours): the answers of later steps are sampled while one trains; online only."""

    async_key = "async_dpo"

    read_unless = (*DPOLossConfig.read_unless, ("num_generations_per_prompt", "online", False))

    def problems(self) -> Iterator[Problem]:
        """Yield a number of answers that makes no pair."""
        yield from super().problems()
        if self.online and (self.num_generations_per_prompt or 0) < 2:
            yield Problem(
                "too-small",
                "num_generations_per_prompt",
                f"{self.num_generations_per_prompt or 'null'} with online: true makes no pair",
                "set it to 2 or more, or online: false",
                ("online",),
            )
        if self.online and self.validates and self.max_val_samples == 0:
            yield Problem(
                "too-small",
                "max_val_samples",
                "0 with online: true leaves a validation nothing to do",
                "set it to 1 or more, or turn validation off (val_period: 0)",
                ("online",),
            )

    @property
    def loss(self) -> DPOLossConfig:
        """Return the keys of the loss alone."""
        return DPOLossConfig(**{name: getattr(self, name) for name in DPOLossConfig.model_fields})
