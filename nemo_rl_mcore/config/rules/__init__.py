"""Rules between sections, a file for each feature.

A rule is a function that yields the problems of a model's policy section, or of a whole recipe, and is named in the
RULES of its file; FEATURES names the files. Sections know nothing of these rules: the package holds them to them.
"""

from collections.abc import Iterator
from itertools import chain

from nemo_rl_mcore.config.base import Problem, collect_problems
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.rules import (
    asynchronous,
    batch_sizes,
    checkpointing,
    copies,
    environments,
    episodes,
    fused_logprobs,
    generation,
    lengths,
    losses,
    offload,
    packing,
    parallelism,
    prompts,
    second_models,
    survival,
    weights,
)
from nemo_rl_mcore.config.rules.feature import Rules
from nemo_rl_mcore.config.run_models import ModelPlan

FEATURES: tuple[Rules, ...] = (
    fused_logprobs.RULES,
    parallelism.RULES,
    weights.RULES,
    batch_sizes.RULES,
    packing.RULES,
    lengths.RULES,
    prompts.RULES,
    episodes.RULES,
    checkpointing.RULES,
    second_models.RULES,
    generation.RULES,
    copies.RULES,
    losses.RULES,
    asynchronous.RULES,
    survival.RULES,
    environments.RULES,
    offload.RULES,
)


def model_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what stops any model, one that is neither trained nor asked for answers included."""
    yield from chain.from_iterable(rule(policy) for feature in FEATURES for rule in feature.of_models)


def policy_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what does not go together inside a policy."""
    for feature in FEATURES:
        for rule in (*feature.of_models, *feature.of_policies):
            yield from rule(policy)


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not go together between sections, and what stops a model beside the policy."""
    yield from chain.from_iterable(rule(config) for feature in FEATURES for rule in feature.of_runs)
    for plan in config.models.values():
        if plan.policy is not config.policy:
            yield from _second_model_problems(config, plan)


def _second_model_problems(config: RunConfig, plan: ModelPlan) -> Iterator[Problem]:
    """Yield the rules of a policy that a model beside it breaks, unless the recipe's own walk tells of them."""
    of_policy = set(collect_problems(config.policy, "policy"))
    of_section = set(collect_problems(getattr(config, plan.name), plan.name))
    if plan.trained:
        problems = collect_problems(plan.policy, "policy")
    else:
        problems = (problem.below("policy") for problem in model_problems(plan.policy))
    for problem in problems:
        told = plan.in_recipe(problem)
        shared = told.path == problem.path and problem in of_policy
        if not shared and told not in of_section:
            yield told
