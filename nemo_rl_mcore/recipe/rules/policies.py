"""The rules of a policy, for recipes and for a worker that is built in Python."""

from collections.abc import Iterator, Mapping

from nemo_rl_mcore.config.base import ConfigError, Problem, collect_problems
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models.pretrained import fill_from_model_name
from nemo_rl_mcore.recipe.rules import (
    batch_sizes,
    context_parallelism,
    copies,
    fused_logprobs,
    generation,
    kernels,
    model_class,
    packing,
    parallelism,
    vllm,
    weights,
)
from nemo_rl_mcore.recipe.rules.feature import Rules

FEATURES: tuple[Rules, ...] = (
    fused_logprobs.RULES,
    parallelism.RULES,
    context_parallelism.RULES,
    model_class.RULES,
    weights.RULES,
    batch_sizes.RULES,
    packing.RULES,
    generation.RULES,
    vllm.RULES,
    copies.RULES,
    kernels.RULES,
)


def model_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what stops any model, one that is neither trained nor asked for answers included."""
    for feature in FEATURES:
        for rule in feature.of_models:
            yield from rule(policy)


def policy_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what does not go together within and between the sections of a policy."""
    yield from collect_problems(policy)
    yield from between_sections(policy)


def between_sections(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what does not go together between the sections of a policy."""
    for feature in FEATURES:
        for rule in (*feature.of_models, *feature.of_policies):
            yield from rule(policy)


def checked_policy(given: PolicyConfig | Mapping[str, object], *, only_read: bool = False) -> PolicyConfig:
    """Return a policy, or the equal mapping, that meets its rules; raises ConfigError with every one it breaks.

    A mapping is first completed by what its `model_name` says. only_read: hold it to the rules of a model that is
    neither trained nor asked for answers.
    """
    problems: list[Problem] = []
    if not isinstance(given, PolicyConfig):
        section, problems = fill_from_model_name(given)
        if problems:
            raise ConfigError(problems)
        given = PolicyConfig.model_validate(section)
    found = (model_problems if only_read else policy_problems)(given)
    if wrong := tuple(problem for problem in found if not problem.warns):
        raise ConfigError(wrong)
    return given
