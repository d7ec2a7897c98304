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


class ClippedPolicyGradientConfig(RunConfig):
    """A run whose loss is the clipped policy gradient."""

    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The policy's loss."""

    @property
    def gradient_key(self) -> str:
        """Return the path of the loss."""
        return "loss_fn"

    @property
    def needs_reference(self) -> bool:
        """Return whether there is a KL penalty."""
        return self.loss_fn.reference_policy_kl_penalty != 0


class GRPOMasterConfig(ClippedPolicyGradientConfig):
    """Everything a GRPO run depends on."""

    algorithm = "grpo"

    grpo: GRPOConfig
    """The loop."""


class PPOMasterConfig(ClippedPolicyGradientConfig):
    """Everything a PPO run depends on."""

    algorithm = "ppo"

    ppo: PPOConfig
    """The loop."""
    value: ValueConfig
    """The critic."""
    value_loss_fn: MseValueLossConfig = MseValueLossConfig()
    """The critic's loss."""

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Return the policy and the critic."""
        return {**super().models, "value": self.value.plan(self.policy)}


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
        return self.dpo.num_generations_per_prompt or 0

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


def source_of_prev_logprobs(config: RunConfig) -> str | None:
    """Return what gives prev_logprobs, and why, for `check`; None where no loss takes a ratio to them."""
    if isinstance(config, DistillationMasterConfig) and config.loss_fn.rl_weight:
        return "a pass before training, for loss_fn.rl_weight"
    if not isinstance(config, GRPOMasterConfig | PPOMasterConfig):
        return None
    reader = reader_of_prev_logprobs(config)
    if reader is None:
        return (
            "those of the training pass: one optimizer step over each rollout, and nothing reads them before"
        )
    return f"a pass before training, for {reader}"


def reader_of_prev_logprobs(config: GRPOMasterConfig | PPOMasterConfig) -> str | None:
    """Return what reads prev_logprobs before training, or after its first optimizer step.

    None where nothing does: then the training pass gives the very numbers, as no weight has changed.
    """
    policy, loss = config.policy, config.loss_fn
    steps = config.samples_per_step // policy.train_global_batch_size
    mismatch = policy.generation.mismatch
    if isinstance(config, PPOMasterConfig):
        steps *= config.ppo.ppo_epochs
    readers = {
        "policy.recompute_prev_logprobs: always": policy.recompute_prev_logprobs == "always",
        f"{steps} optimizer steps over each rollout": steps > 1,
        **{f"{name}.type: {one.type}": one.type is not None for name, one in config.losses.items()},
        f"{config.algorithm}.adv_estimator.type": config.loop.estimator_type is not None,
        "loss_fn.use_kl_in_reward: true": loss.use_kl_in_reward and loss.reference_policy_kl_penalty != 0,
        f"policy.generation.mismatch.action: {mismatch.action}": mismatch.threshold is not None
        and mismatch.action != "warn",
        "ppo.critic_warmup_steps, which train no policy": isinstance(config, PPOMasterConfig)
        and config.ppo.critic_warmup_steps > 0,
    }
    return next((reader for reader, reads in readers.items() if reads), None)
