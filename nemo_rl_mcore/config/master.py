"""The whole recipe of a GRPO run."""

from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import model_validator

from nemo_rl_mcore.config.algorithm import GRPOConfig
from nemo_rl_mcore.config.base import PositiveInt, Problem, Seed, StrictModel
from nemo_rl_mcore.config.checks import master_problems
from nemo_rl_mcore.config.cluster import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_rl_mcore.config.data import DataConfig, EnvConfig
from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.config.policy import PolicyConfig


class GRPOMasterConfig(StrictModel):
    """Everything a GRPO run depends on."""

    seed: Seed = 42
    """Seed of the weights, the prompts and the sampling; left out, it is grpo.seed."""
    max_consecutive_skips: PositiveInt = 5
    """Optimizer steps skipped in a row, for a loss or gradient that is not finite, that end the run."""
    grpo: GRPOConfig
    """The loop."""
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The loss."""
    policy: PolicyConfig
    """The model that is trained."""
    data: DataConfig
    """The prompts."""
    env: EnvConfig = EnvConfig()
    """The environment that scores the answers."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """When checkpoints are written."""
    logger: LoggerConfig = LoggerConfig()
    """What is recorded, and where."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines."""

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return max(1, self.cluster.world_size // self.policy.megatron_cfg.model_parallel_size)

    @model_validator(mode="before")
    @classmethod
    def _fill_seed(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        grpo = section.get("grpo")
        inner = cast("Mapping[str, object]", grpo).get("seed") if isinstance(grpo, Mapping) else None
        if "seed" not in section and inner is not None:
            section["seed"] = inner
        return section

    def problems(self) -> Iterator[Problem]:
        """Yield what does not go together between sections."""
        yield from master_problems(self)
