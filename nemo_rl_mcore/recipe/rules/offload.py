"""What does not go with offloading, where nobody would get the memory, and with a place for a reference policy."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.master import PPOMasterConfig, SFTMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

_OFFLOAD = "policy.offload"
_ENGINES = ("policy.generation.backend", "policy.generation.colocated.enabled")


def _refused(config: RunConfig, reason: str, remedy: str, *related: str) -> Problem:
    return Problem("incompatible", _OFFLOAD, f"{config.policy.offload} {reason}", remedy, related)


def _nobody_needs_it(config: RunConfig) -> Iterator[Problem]:
    if config.policy.offload == "none":
        return
    if config.asynchronous:
        yield _refused(
            config,
            f"does not go with {config.asynchrony_key}.enabled: true: its engines have devices of their own, and its "
            "ranks read log-probabilities between the chunks of a step, whose gradients must stay",
            "set it to none",
            f"{config.asynchrony_key}.enabled",
        )
    elif isinstance(config, SFTMasterConfig) and not config.policy.generation.takes_turns:
        reason = "gives nobody anything: supervised fine-tuning reads no log-probabilities before it trains"
        yield _refused(config, reason, "set it to none", *_ENGINES)


def _weights_beside_reading_ranks(config: RunConfig) -> Iterator[Problem]:
    if (
        config.policy.offload == "all"
        and not config.policy.generation.takes_turns
        and not config.asynchronous
    ):
        yield _refused(
            config,
            "takes the weights off the device while engines answer, and none takes turns with the ranks there",
            "set it to grads_optimizer, or policy.generation.backend: vllm with colocated.enabled: true",
            *_ENGINES,
        )


def _weights_beside_engines_at_work(config: RunConfig) -> Iterator[Problem]:
    generation = config.policy.generation
    if config.policy.offload != "all" or not generation.takes_turns or config.asynchronous:
        return
    if generation.compare_at_start:
        yield _refused(
            config,
            "does not go with policy.generation.compare_at_start: true: ranks would read with all their weights while "
            "engines hold their caches",
            "set policy.generation.compare_at_start: false, or policy.offload: grads_optimizer",
            "policy.generation.compare_at_start",
        )
    if generation.vllm_cfg.max_restarts:
        yield _refused(
            config,
            f"does not go with policy.generation.vllm_cfg.max_restarts: {generation.vllm_cfg.max_restarts}: an engine "
            "that restarts gets weights while others hold their caches",
            "set policy.generation.vllm_cfg.max_restarts: 0, or policy.offload: grads_optimizer",
            "policy.generation.vllm_cfg.max_restarts",
        )


def _critic(config: RunConfig) -> Iterator[Problem]:
    if (
        isinstance(config, PPOMasterConfig)
        and config.policy.offload != "none"
        and config.policy.generation.takes_turns
    ):
        yield _refused(
            config,
            "does not go with ppo and engines on the ranks' devices: the critic, which trained last, would keep its "
            "own gradients and optimizer there while they answer",
            "set it to none, or policy.generation.colocated.enabled: false",
            *_ENGINES,
        )


def _no_reference(config: RunConfig) -> Iterator[Problem]:
    if config.policy.reference_on_device != "auto" and not config.needs_reference:
        given = config.policy.reference_on_device
        yield has_no_effect("policy.reference_on_device", given, "without a reference policy")


RULES = Rules(
    of_runs=(
        _no_reference,
        _nobody_needs_it,
        _weights_beside_reading_ranks,
        _weights_beside_engines_at_work,
        _critic,
    )
)
