"""The rules of a recipe: of its sections, between them, and of the models beside the policy."""

from collections.abc import Iterator, Mapping
from itertools import chain

from nemo_rl_mcore.config.base import ConfigError, Problem, collect_problems
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.run_models import ModelPlan
from nemo_rl_mcore.recipe.rules import (
    asynchronous,
    batch_sizes,
    checkpointing,
    context_parallelism,
    copies,
    embedded,
    endpoint,
    environments,
    episodes,
    fused_logprobs,
    generation,
    kernels,
    lengths,
    losses,
    model_class,
    offload,
    packing,
    parallelism,
    prompts,
    second_models,
    survival,
    vllm,
    weights,
)
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.policies import between_sections, model_problems, policy_problems

FEATURES: tuple[Rules, ...] = (
    fused_logprobs.RULES,
    parallelism.RULES,
    context_parallelism.RULES,
    model_class.RULES,
    weights.RULES,
    batch_sizes.RULES,
    packing.RULES,
    lengths.RULES,
    prompts.RULES,
    episodes.RULES,
    checkpointing.RULES,
    second_models.RULES,
    generation.RULES,
    vllm.RULES,
    embedded.RULES,
    copies.RULES,
    losses.RULES,
    asynchronous.RULES,
    survival.RULES,
    environments.RULES,
    endpoint.RULES,
    offload.RULES,
    kernels.RULES,
)


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not go together within and between the sections of a recipe, of all its models."""
    found = tuple(_problems_on_all_machines(config))
    yield from found
    if (
        config.cluster.elastic == "shrink"
        and all(problem.warns for problem in found)
        and shrunk(config, config.cluster.num_nodes - 1) is None
    ):
        yield survival.no_fewer_machines(config)


def shrunk(config: RunConfig, nodes: int) -> RunConfig | None:
    """Return the recipe on the largest number of machines that its rules allow: `nodes` at most, fewer than its own.

    The model must fit, and the batch divide by the copies that are left. None where no such number of machines passes.
    """
    for fewer in range(min(nodes, config.cluster.num_nodes - 1), 0, -1):
        cluster = config.cluster.model_copy(update={"num_nodes": fewer})
        # What is asked of a recipe that may shrink is not asked of the one that it shrinks to.
        fixed = cluster.model_copy(update={"elastic": "none"})
        problems = _problems_on_all_machines(config.model_copy(update={"cluster": fixed}))
        if all(problem.warns for problem in problems):
            return config.model_copy(update={"cluster": cluster})
    return None


def _problems_on_all_machines(config: RunConfig) -> Iterator[Problem]:
    yield from collect_problems(config)
    yield from (problem.below("policy") for problem in between_sections(config.policy))
    yield from chain.from_iterable(rule(config) for feature in FEATURES for rule in feature.of_runs)
    for plan in config.models.values():
        if plan.policy is not config.policy:
            yield from _second_model_problems(config, plan)


def _second_model_problems(config: RunConfig, plan: ModelPlan) -> Iterator[Problem]:
    """Yield the rules of a policy that a model beside it breaks, unless the recipe's own walk tells of them."""
    of_policy = set(policy_problems(config.policy))
    of_section = set(collect_problems(getattr(config, plan.name), plan.name))
    for problem in (policy_problems if plan.trained else model_problems)(plan.policy):
        told = plan.in_recipe(problem.below("policy"))
        shared = told.path == f"policy.{problem.path}" and problem in of_policy
        if not shared and told not in of_section:
            yield told


def checked_run[Kind: RunConfig](kind: type[Kind], given: Mapping[str, object]) -> Kind:
    """Return the recipe of a mapping, which meets all its rules; raises ConfigError with every one it breaks."""
    config = kind.model_validate(given)
    if wrong := tuple(problem for problem in run_problems(config) if not problem.warns):
        raise ConfigError(wrong)
    return config
