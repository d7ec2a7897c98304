"""The whole recipe of a run, one class for each algorithm."""

from collections.abc import Mapping

from nemo_rl_mcore.config.algorithm import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.loss import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig, TeacherConfig, ValueConfig


class GRPOMasterConfig(RunConfig):
    """Everything a GRPO run depends on."""

    algorithm = "grpo"

    grpo: GRPOConfig
    """The loop."""
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The loss."""

    @property
    def gradient_key(self) -> str:
        """Return the path of the loss."""
        return "loss_fn"

    @property
    def needs_reference(self) -> bool:
        """Return whether there is a KL penalty."""
        return self.loss_fn.reference_policy_kl_penalty != 0


class PPOMasterConfig(RunConfig):
    """Everything a PPO run depends on."""

    algorithm = "ppo"

    ppo: PPOConfig
    """The loop."""
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The policy's loss."""
    value: ValueConfig
    """The critic."""
    value_loss_fn: MseValueLossConfig = MseValueLossConfig()
    """The critic's loss."""

    @property
    def gradient_key(self) -> str:
        """Return the path of the loss."""
        return "loss_fn"

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Return the policy and the critic."""
        return {**super().models, "value": self.value.plan(self.policy)}

    @property
    def needs_reference(self) -> bool:
        """Return whether there is a KL penalty."""
        return self.loss_fn.reference_policy_kl_penalty != 0


class DistillationMasterConfig(RunConfig):
    """Everything a distillation run depends on."""

    algorithm = "distillation"

    distillation: DistillationConfig
    """The loop."""
    loss_fn: DistillationLossConfig = DistillationLossConfig()
    """The divergence, and what goes beside it."""
    teacher: TeacherConfig
    """The model to learn from."""

    @property
    def gradient_key(self) -> str:
        """Return the path of the loss beside the divergence, if it has a weight."""
        return "loss_fn.rl" if self.loss_fn.rl_weight else ""

    @property
    def learns_from_samples(self) -> bool:
        """Return whether it is on policy; otherwise the answers are those of the data set."""
        return self.distillation.on_policy

    @property
    def generations_per_prompt(self) -> int:
        """Off policy each prompt has the answer of the data set."""
        return super().generations_per_prompt if self.distillation.on_policy else 0

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Return the policy and its teacher."""
        return {**super().models, "teacher": self.teacher.plan(self.policy)}

    @property
    def row_kind(self) -> RowKind:
        """Return the kind of rows: prompts on policy, otherwise rows with answers."""
        return RowKind.PROMPTS if self.distillation.on_policy else RowKind.ANSWERS

    @property
    def needs_reference(self) -> bool:
        """Return whether the policy gradient beside the divergence has a KL penalty."""
        return self.loss_fn.rl_weight != 0 and self.loss_fn.rl.reference_policy_kl_penalty != 0


class SFTMasterConfig(RunConfig):
    """Everything a supervised fine-tuning run depends on."""

    algorithm = "sft"

    sft: SFTConfig
    """The loop."""
    loss_fn: NLLLossConfig = NLLLossConfig()
    """The loss."""

    @property
    def learns_from_samples(self) -> bool:
        """Return False: the answers are given."""
        return False

    @property
    def row_kind(self) -> RowKind:
        """Return the kind of rows whose answers are imitated."""
        return RowKind.ANSWERS


class DPOMasterConfig(RunConfig):
    """Everything a direct preference optimization run depends on."""

    algorithm = "dpo"

    dpo: DPOConfig
    """The loop, and the loss."""

    @property
    def learns_from_samples(self) -> bool:
        """Return whether it is online; otherwise the pairs are those of the data set."""
        return self.dpo.online

    @property
    def generations_per_prompt(self) -> int:
        """Online a pair is picked from a group."""
        return self.dpo.num_generations_per_prompt or 0 if self.dpo.online else 0

    @property
    def rows_per_sample(self) -> int:
        """Return two: a sample is a pair of the chosen answer and the rejected one."""
        return 2

    @property
    def row_kind(self) -> RowKind:
        """Return the kind of rows: prompts online, otherwise pairs."""
        return RowKind.PROMPTS if self.dpo.online else RowKind.PAIRS

    @property
    def needs_reference(self) -> bool:
        """DPO compares with the weights at the start."""
        return True


RUN_CONFIGS: dict[str, type[RunConfig]] = {
    kind.algorithm: kind
    for kind in (
        GRPOMasterConfig,
        PPOMasterConfig,
        DPOMasterConfig,
        SFTMasterConfig,
        DistillationMasterConfig,
    )
}
"""The class of each algorithm's recipes."""


def kind_of(tree: Mapping[str, object]) -> type[RunConfig]:
    """Return the class of a recipe, by the first algorithm's section that it has; GRPO's where it has none."""
    return next((kind for name, kind in RUN_CONFIGS.items() if tree.get(name) is not None), GRPOMasterConfig)
