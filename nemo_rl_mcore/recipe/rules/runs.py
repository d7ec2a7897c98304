"""Rules of a recipe: within sections, between sections, and for models besides the policy."""

from collections.abc import Iterator, Mapping

from nemo_rl_mcore.config.base import ConfigError, Problem, Rules, broken, collect_problems, join_path
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig
from nemo_rl_mcore.recipe.rules import (
    batching,
    generation,
    losses,
    model,
    parallelism,
    prompts,
    rollouts,
    survival,
)
from nemo_rl_mcore.recipe.rules.policies import POLICY_RULES, policy_problems

RUN_RULES: Rules[RunConfig] = (
    *parallelism.RUN_RULES,
    *batching.RUN_RULES,
    *prompts.RUN_RULES,
    *generation.RUN_RULES,
    *losses.RUN_RULES,
    *rollouts.RUN_RULES,
    *survival.RUN_RULES,
    *model.RUN_RULES,
)


def _of_policy(path: str) -> str:
    return join_path("policy", path)


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems within and between a recipe's sections, for all its models."""
    yield from collect_problems(config)
    yield from broken((*POLICY_RULES, *generation.ENGINE_RULES), config.policy, _of_policy)
    yield from broken(RUN_RULES, config, config.key)
    for plan in config.models.values():
        if plan.policy is not config.policy:
            yield from _second_model_problems(config, plan)


def _second_model_problems(config: RunConfig, plan: ModelPlan) -> Iterator[Problem]:
    """Yield problems of a second model under a policy's rules, except those reported for its own section."""

    def key(path: str) -> str:
        return plan.key(_of_policy(path))

    own_section = collect_problems(getattr(config, plan.name), lambda path: join_path(plan.name, path))
    told = {*policy_problems(config.policy, _of_policy), *own_section}
    as_of_policy = policy_problems(plan.policy, _of_policy, only_read=not plan.trained)
    for own, shared in zip(
        policy_problems(plan.policy, key, only_read=not plan.trained), as_of_policy, strict=True
    ):
        if own not in told and not (shared in told and own.path == shared.path):
            yield own


def checked_run[Kind: RunConfig](kind: type[Kind], given: Mapping[str, object]) -> Kind:
    """Build a recipe from a mapping, and raise ConfigError with every rule that it breaks."""
    config = kind.model_validate(given)
    if wrong := tuple(problem for problem in run_problems(config) if not problem.warns):
        raise ConfigError(wrong)
    return config
