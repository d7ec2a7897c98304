"""The complete recipe of a run, with a class for each algorithm."""

from collections.abc import Mapping

from nemo_rl_mcore.config.algorithm import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from nemo_rl_mcore.config.loss import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.config.run_config import RunConfig, TeacherConfig, ValueConfig


class ClippedPolicyGradientConfig(RunConfig):
    """A run whose loss is the clipped policy gradient."""

    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The policy's loss."""


class GRPOMasterConfig(ClippedPolicyGradientConfig):
    """A GRPO run's complete recipe."""

    algorithm = "grpo"

    grpo: GRPOConfig
    """The training loop."""


class PPOMasterConfig(ClippedPolicyGradientConfig):
    """A PPO run's complete recipe."""

    algorithm = "ppo"

    ppo: PPOConfig
    """The training loop."""
    value: ValueConfig
    """The critic."""
    value_loss_fn: MseValueLossConfig = MseValueLossConfig()
    """The critic's loss."""


class DistillationMasterConfig(RunConfig):
    """A distillation run's complete recipe."""

    algorithm = "distillation"

    distillation: DistillationConfig
    """The training loop."""
    loss_fn: DistillationLossConfig = DistillationLossConfig()
    """The divergence from the teacher, and an optional policy-gradient loss."""
    teacher: TeacherConfig
    """The teacher model."""


class SFTMasterConfig(RunConfig):
    """A supervised fine-tuning run's complete recipe."""

    algorithm = "sft"

    sft: SFTConfig
    """The training loop."""
    loss_fn: NLLLossConfig = NLLLossConfig()
    """The loss."""


class DPOMasterConfig(RunConfig):
    """A direct preference optimization run's complete recipe."""

    algorithm = "dpo"
    rows_per_sample = 2

    dpo: DPOConfig
    """The training loop and the loss."""


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
"""Recipe class by algorithm."""


def kind_of(tree: Mapping[str, object]) -> type[RunConfig]:
    """Return a recipe's class by the first algorithm section in it; GRPO's if there is none."""
    return next((kind for name, kind in RUN_CONFIGS.items() if tree.get(name) is not None), GRPOMasterConfig)


def source_of_prev_logprobs(config: RunConfig) -> str | None:
    """Return the source of prev_logprobs, with the reason, for `check`; None if no loss uses them."""
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
    """Return the setting that needs prev_logprobs before training or after its first optimizer step.

    None if there is none: the training pass then computes the same numbers, as no weight has changed.
    """
    policy, loss = config.policy, config.loss_fn
    steps = config.samples_per_step // policy.train_global_batch_size
    generation, estimator = policy.generation, f"{config.algorithm}.adv_estimator.type"
    if isinstance(config, PPOMasterConfig):
        steps *= config.ppo.ppo_epochs
    readers = {
        "policy.recompute_prev_logprobs: always": policy.recompute_prev_logprobs == "always",
        f"{steps} optimizer steps over each rollout": steps > 1,
        **{f"{name}.type: {one.type}": one.type is not None for name, one in config.losses.items()},
        estimator: estimator in config.import_paths,
        "policy.router_replay, whose routes it records": policy.router_replay.enabled
        and not policy.engines_return_routes,
        "loss_fn.use_kl_in_reward: true": loss.use_kl_in_reward and config.models["policy"].reference,
        f"policy.generation.mismatch_action: {generation.mismatch_action}": generation.mismatch_threshold
        is not None
        and generation.mismatch_action != "warn",
        "ppo.critic_warmup_steps, which train no policy": isinstance(config, PPOMasterConfig)
        and config.ppo.critic_warmup_steps > 0,
    }
    return next((reader for reader, reads in readers.items() if reads), None)
