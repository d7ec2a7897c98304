"""Configurations of a second model beside the policy: PPO's critic, and the teacher of a distillation.

Both are cut and run as the policy is, on the same ranks; only what must differ has a key.
"""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import NonNegativeFloat, PositiveInt, Problem, StrictModel
from nemo_rl_mcore.config.megatron import OptimizerConfig, SchedulerConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig


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

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """The configuration of the critic's workers."""
        schedule = self.scheduler.model_copy(
            update={
                "start_weight_decay": self.optimizer.weight_decay,
                "end_weight_decay": self.optimizer.weight_decay,
            }
            if self.scheduler.weight_decay_incr_style == "constant"
            else {}
        )
        megatron = policy.megatron_cfg.model_copy(update={"optimizer": self.optimizer, "scheduler": schedule})
        update: dict[str, object] = {"megatron_cfg": megatron}
        for key in ("max_grad_norm", "train_micro_batch_size"):
            if (own := getattr(self, key)) is not None:
                update[key] = own
        return policy.model_copy(update=update)


class TeacherConfig(StrictModel):
    """The teacher: a frozen model with the policy's tokenizer, of the same size or another one."""

    model: ModelConfig | None = None
    """The teacher's architecture; null is policy.model."""
    model_name: str | None = None
    """Its weights: a Hugging Face folder or hub id."""
    init_checkpoint: str | None = None
    """Its weights: a checkpoint of this package."""
    warm_start: str | None = None
    """Its weights: a recipe that is run first (ours)."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """The configuration of the teacher's workers."""
        return policy.model_copy(
            update={
                "model": self.model or policy.model,
                "model_name": self.model_name,
                "init_checkpoint": self.init_checkpoint,
            }
        )

    def problems(self) -> Iterator[Problem]:
        """Yield a teacher that knows nothing, or has several sources of weights."""
        sources = [key for key in ("model_name", "init_checkpoint", "warm_start") if getattr(self, key)]
        if len(sources) != 1:
            yield Problem(
                "init_checkpoint",
                f"a teacher has one source of weights, and {' and '.join(sources) or 'none'} is given",
                "set one of model_name, init_checkpoint and warm_start",
                ("model_name", "warm_start"),
            )

    def problems_beside(self, policy: PolicyConfig) -> Iterator[Problem]:
        """Yield what does not go with the policy; paths are those of the recipe."""
        if self.model is not None and self.model.vocab_size != policy.model.vocab_size:
            yield Problem(
                "teacher.model.vocab_size",
                f"{self.model.vocab_size} is not policy.model.vocab_size: {policy.model.vocab_size}",
                "teacher and student name the same tokens; make the two equal",
                ("policy.model.vocab_size",),
            )
        ddp = policy.megatron_cfg.distributed_data_parallel_config
        if ddp.overlap_param_gather:
            yield Problem(
                "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
                "true does not go with distillation, which reads the output weight itself",
                "set it to false",
            )
        if policy.sequence_packing.enabled:
            yield Problem(
                "policy.sequence_packing.enabled",
                "true does not go with distillation: what the teacher says is laid out sample by sample",
                "set it to false; policy.dynamic_batching also sizes microbatches by tokens",
            )
