"""What a loss, and the estimator of its advantages, ask of the loop."""

from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import AdvantageEstimatorConfig
from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.loss import ClippedPGLossConfig
from nemo_rl_mcore.config.master import DistillationMasterConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules


def policy_gradient(config: RunConfig) -> tuple[str, ClippedPGLossConfig, AdvantageEstimatorConfig] | None:
    """Return the policy-gradient loss of a run that has one: its section, itself, and what makes its advantages."""
    match config:
        case GRPOMasterConfig():
            return "loss_fn", config.loss_fn, config.grpo.adv_estimator
        case PPOMasterConfig():
            return "loss_fn", config.loss_fn, config.ppo.adv_estimator
        case DistillationMasterConfig() if config.loss_fn.rl_weight:
            return "loss_fn.rl", config.loss_fn.rl, config.distillation.adv_estimator
        case _:
            return None


def one_step_per_rollout(config: RunConfig) -> bool:
    """Say whether the run must take one optimizer step over a rollout: it trains on parts of it as they come, or its
    loss treats the policy as the one that sampled.
    """
    of_loss = policy_gradient(config)
    return config.streams or (of_loss is not None and of_loss[1].force_on_policy_ratio)


def _one_step_per_rollout(config: RunConfig) -> Iterator[Problem]:
    if (of_loss := policy_gradient(config)) is None:
        return
    section, loss, _ = of_loss
    batch, samples = config.policy.train_global_batch_size, config.samples_per_step
    # A batch that does not divide the samples is told in batch_sizes, with the size that serves here too.
    if loss.force_on_policy_ratio and batch != samples and samples % batch == 0:
        yield Problem(
            "incompatible",
            f"{section}.force_on_policy_ratio",
            f"true needs one optimizer step per rollout, and policy.train_global_batch_size: {batch} "
            f"is not the {samples} samples of a step",
            f"set policy.train_global_batch_size: {samples}, or force_on_policy_ratio: false",
            (
                "policy.train_global_batch_size",
                f"{config.algorithm}.num_prompts_per_step",
                f"{config.algorithm}.num_generations_per_prompt",
            ),
        )
    if isinstance(config, PPOMasterConfig) and loss.force_on_policy_ratio and config.ppo.ppo_epochs > 1:
        yield Problem(
            "incompatible",
            f"{section}.force_on_policy_ratio",
            f"true needs one optimizer step per rollout, and ppo.ppo_epochs: {config.ppo.ppo_epochs} makes more",
            "set ppo.ppo_epochs: 1, or force_on_policy_ratio: false",
            ("ppo.ppo_epochs",),
        )


def _bounds_of_nothing(config: RunConfig) -> Iterator[Problem]:
    if (of_loss := policy_gradient(config)) is None:
        return
    section, loss, _ = of_loss
    bounded = (
        loss.truncated_importance_sampling_ratio is not None
        or loss.truncated_importance_sampling_ratio_min is not None
    )
    if bounded and loss.truncated_importance_sampling_type is None:
        yield Problem(
            "requires",
            f"{section}.truncated_importance_sampling_ratio",
            f"a bound needs {section}.truncated_importance_sampling_type, which is null",
            "set truncated_importance_sampling_type: tis, or the bounds to null"
            if loss.use_importance_sampling_correction
            else "set the bounds to null, or truncated_importance_sampling_type: tis with "
            "use_importance_sampling_correction: true",
            (
                f"{section}.truncated_importance_sampling_type",
                f"{section}.truncated_importance_sampling_ratio_min",
            ),
        )


def _lost_penalty(config: RunConfig) -> Iterator[Problem]:
    if (of_loss := policy_gradient(config)) is None or isinstance(config, PPOMasterConfig):
        return
    section, loss, estimator = of_loss
    name = f"{config.algorithm}.adv_estimator.name"
    if loss.use_kl_in_reward and estimator.name == "grpo" and estimator.type is None:
        yield Problem(
            "incompatible",
            f"{section}.use_kl_in_reward",
            f"true loses the KL penalty with {name}: grpo, which does not subtract it",
            f"set use_kl_in_reward: false, or {name}: reinforce_plus_plus",
            (name,),
        )


def _critic_warmup(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config, PPOMasterConfig) and config.ppo.critic_warmup_steps >= config.ppo.max_num_steps:
        yield Problem(
            "too-large",
            "ppo.critic_warmup_steps",
            f"{config.ppo.critic_warmup_steps} leaves the policy none of max_num_steps: {config.ppo.max_num_steps}",
            "lower it",
            ("ppo.max_num_steps",),
        )


def _distillation(config: RunConfig) -> Iterator[Problem]:
    if not isinstance(config, DistillationMasterConfig):
        return
    loop, loss, vocabulary = config.distillation, config.loss_fn, config.policy.model.vocab_size
    if (loop.topk_logits_k or 0) > vocabulary:
        yield Problem(
            "too-large",
            "distillation.topk_logits_k",
            f"{loop.topk_logits_k} is above policy.model.vocab_size: {vocabulary}",
            "lower it; null is the whole vocabulary",
            ("policy.model.vocab_size",),
        )
    if loss.rl_weight and not loop.on_policy:
        yield Problem(
            "requires",
            "loss_fn.rl_weight",
            f"{loss.rl_weight} needs answers of the student, and distillation.on_policy is false",
            "set rl_weight: 0 and remove loss_fn.rl, or set distillation.on_policy: true",
            ("distillation.on_policy",),
        )


def _prev_logprobs(config: RunConfig) -> Iterator[Problem]:
    if config.policy.recompute_prev_logprobs == "always" and policy_gradient(config) is None:
        without = " without loss_fn.rl_weight" if isinstance(config, DistillationMasterConfig) else ""
        because = f"with {config.algorithm}{without}, which has no ratio to earlier weights"
        yield has_no_effect("policy.recompute_prev_logprobs", "always", because)


RULES = Rules(
    of_runs=(
        _one_step_per_rollout,
        _bounds_of_nothing,
        _lost_penalty,
        _critic_warmup,
        _prev_logprobs,
        _distillation,
    )
)
