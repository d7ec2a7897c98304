"""Whether a pass before training has to say how probable the answers are under the weights that train."""

from nemo_rl_mcore.config.master import DistillationMasterConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig


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
