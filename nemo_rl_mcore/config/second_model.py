"""Configurations of a second model beside the policy: PPO's critic, and the teacher of a distillation.

Both are cut and run as the policy is, on the same ranks; only what must differ has a key.
"""

from collections.abc import Iterator

from pydantic import model_validator

from nemo_rl_mcore.config.base import (
    FolderOrName,
    FolderPath,
    NonNegativeFloat,
    PositiveInt,
    Problem,
    StrictModel,
    with_other_spellings,
)
from nemo_rl_mcore.config.megatron import OptimizerConfig, SchedulerConfig, fill_weight_decay
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_models import ModelPlan, Role


class ValueConfig(StrictModel):
    """The critic: the policy's architecture and start weights, with a value head and an optimizer of its own."""

    optimizer: OptimizerConfig
    """The critic's optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The critic's learning rate and weight decay over its optimizer steps."""
    max_grad_norm: NonNegativeFloat | None = None
    """The critic's gradients are scaled down to this norm; null is policy.max_grad_norm."""
    train_micro_batch_size: PositiveInt | None = None
    """Samples per forward and backward pass of one rank; null is policy.train_micro_batch_size."""

    @model_validator(mode="before")
    @classmethod
    def _read_other_spellings(cls, given: object) -> object:
        return with_other_spellings(fill_weight_decay(given), ("max_grad_norm", "optimizer.clip_grad"))

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """The critic beside a policy."""
        of_megatron = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        own: dict[str, object] = {
            key: getattr(self, key)
            for key in ("max_grad_norm", "train_micro_batch_size")
            if getattr(self, key) is not None
        }
        megatron = policy.megatron_cfg.model_copy(update=of_megatron)
        return ModelPlan(
            "value",
            policy.model_copy(update={"megatron_cfg": megatron, **own}),
            role=Role.VALUE,
            own_keys={f"policy.megatron_cfg.{key}": f"value.{key}" for key in of_megatron}
            | {f"policy.{key}": f"value.{key}" for key in own},
        )


class TeacherConfig(StrictModel):
    """The teacher: a frozen model with the policy's tokenizer, of the same size or another one."""

    model: ModelConfig | None = None
    """The teacher's architecture; null is policy.model."""
    model_name: FolderOrName | None = None
    """Its weights: a Hugging Face folder or hub id."""
    init_checkpoint: FolderPath | None = None
    """Its weights: a checkpoint of this package."""
    warm_start: str | None = None
    """Its weights: a recipe that is run first (ours)."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """The teacher beside a policy."""
        # There is no backward pass to overlap with, and Megatron asks more of a model that would have one.
        megatron = policy.megatron_cfg.model_copy(update={"overlap_moe_expert_parallel_comm": False})
        own: dict[str, object] = {"model_name": self.model_name, "init_checkpoint": self.init_checkpoint}
        if self.model is not None:
            own["model"] = self.model
        return ModelPlan(
            "teacher",
            policy.model_copy(update={"megatron_cfg": megatron, **own}),
            trained=False,
            warm_start=self.warm_start,
            own_keys={f"policy.{key}": f"teacher.{key}" for key in own},
        )

    def problems(self) -> Iterator[Problem]:
        """Yield a teacher that knows nothing, or has several sources of weights."""
        sources = [key for key in ("model_name", "init_checkpoint", "warm_start") if getattr(self, key)]
        if len(sources) != 1:
            yield Problem(
                "one-of",
                "init_checkpoint",
                f"a teacher has one source of weights, and {' and '.join(sources) or 'none'} is given",
                "set one of model_name, init_checkpoint and warm_start",
                ("model_name", "warm_start"),
            )
