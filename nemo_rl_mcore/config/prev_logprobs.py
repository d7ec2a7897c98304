"""Whether a pass before training has to say how probable the answers are under the weights that train."""

from nemo_rl_mcore.config.master import GRPOMasterConfig, PPOMasterConfig, RunConfig


def computes_prev_logprobs(config: RunConfig) -> bool:
    """Whether a run trains by the ratio to its own earlier log-probabilities, whichever pass gives them."""
    return isinstance(config, GRPOMasterConfig | PPOMasterConfig)


def reader_of_prev_logprobs(config: RunConfig) -> str | None:
    """What reads prev_logprobs before training, or behind its first optimizer step.

    None where nothing does: then the training pass gives the very numbers, as no weight has changed.
    """
    if not isinstance(config, GRPOMasterConfig | PPOMasterConfig):
        return "no other pass gives them"
    policy, loss = config.policy, config.loss_fn
    steps = config.samples_per_step // policy.train_global_batch_size
    mismatch = policy.generation.mismatch
    if isinstance(config, PPOMasterConfig):
        steps *= config.ppo.ppo_epochs
    readers = {
        "policy.recompute_prev_logprobs: always": policy.recompute_prev_logprobs == "always",
        f"{steps} optimizer steps over each rollout": steps > 1,
        f"loss_fn.type: {loss.type}": loss.type is not None,
        "loss_fn.use_kl_in_reward: true": loss.use_kl_in_reward and loss.reference_policy_kl_penalty != 0,
        f"policy.generation.mismatch.action: {mismatch.action}": mismatch.threshold is not None
        and mismatch.action != "warn",
        "ppo.critic_warmup_steps, which train no policy": isinstance(config, PPOMasterConfig)
        and config.ppo.critic_warmup_steps > 0,
    }
    return next((reader for reader, reads in readers.items() if reads), None)
