"""The models of a run: what each of them is, and where the recipe sets what it does not share with the policy.

PPO's critic and the teacher of a distillation are cut and run as the policy is, on the same ranks; only what must
differ has a key.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

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
from nemo_rl_mcore.config.imports import Arguments
from nemo_rl_mcore.config.megatron import OptimizerConfig, SchedulerConfig, fill_weight_decay
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig

_POLICY_KEY = re.compile(r"\bpolicy(\.\w+)+")


class Role(Enum):
    """What the model of a worker is for: to say how probable tokens are, or how much is to be expected of a state."""

    POLICY = "policy"
    VALUE = "value"


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run; it has ranks of its own.

    name: its section of the recipe and, if it is trained, its folder in a checkpoint.
    policy: the configuration of its workers, which has met the rules of a policy (those that concern a frozen one).
    reference: whether the weights of the start are kept beside it.
    warm_start: the recipe that is run first for its weights, where they are not those of the run's own warm start.
    own_keys: keys of the policy that the recipe sets elsewhere for this model, and where.
    """

    name: str
    policy: PolicyConfig
    role: Role = Role.POLICY
    trained: bool = True
    reference: bool = False
    warm_start: str | None = None
    own_keys: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def saved_in_background(self) -> bool:
        """Return whether its checkpoints are written in the background."""
        return self.trained and self.policy.megatron_cfg.checkpoint.async_save

    def key(self, path: str) -> str:
        """Return where the recipe sets for this model what `path`, such as policy.precision, is for the policy."""
        for shared, own in self.own_keys.items():
            if path == shared or path.startswith(f"{shared}."):
                return own + path.removeprefix(shared)
        return path

    def in_recipe(self, problem: Problem) -> Problem:
        """Return a problem of this model's configuration, told by the keys that the user finds in the recipe."""
        return replace(
            problem,
            path=self.key(problem.path),
            what=self._in_recipe(problem.what),
            remedy=self._in_recipe(problem.remedy),
            related=tuple(self.key(path) for path in problem.related),
        )

    def _in_recipe(self, text: str) -> str:
        return _POLICY_KEY.sub(lambda match: self.key(match.group()), text)


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
        """Return the critic beside a policy."""
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
    hf_config_overrides: Arguments | None = None
    """Keys of its config.json and their values in its place, as of policy.hf_config_overrides."""
    init_checkpoint: FolderPath | None = None
    """Its weights: a checkpoint of this package."""
    warm_start: str | None = None
    """Its weights: a recipe that is run first (ours)."""

    def plan(self, policy: PolicyConfig) -> ModelPlan:
        """Return the teacher beside a policy."""
        # There is no backward pass to overlap with, and Megatron asks more of a model that would have one.
        megatron = policy.megatron_cfg.model_copy(update={"overlap_moe_expert_parallel_comm": False})
        of_weights = ("model_name", "hf_config_overrides", "init_checkpoint")
        own: dict[str, object] = {key: getattr(self, key) for key in of_weights}
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
