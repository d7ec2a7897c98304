"""Rules for a model on its ranks, for recipes and for workers built in Python."""

from collections.abc import Iterator, Mapping

from nemo_rl_mcore.config.base import ConfigError, Key, Problem, Rules, broken, collect_problems
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models.pretrained import fill_from_model_name
from nemo_rl_mcore.recipe.rules import batching, model, parallelism

MODEL_RULES: Rules[PolicyConfig] = (*parallelism.MODEL_RULES, *model.MODEL_RULES)
"""Rules for any model, including models that are neither trained nor used to generate."""
POLICY_RULES: Rules[PolicyConfig] = (
    *MODEL_RULES,
    *parallelism.POLICY_RULES,
    *model.POLICY_RULES,
    *batching.POLICY_RULES,
)


def policy_problems(policy: PolicyConfig, key: Key = str, *, only_read: bool = False) -> Iterator[Problem]:
    """Yield a model's problems; only_read: true for a model that is neither trained nor used to generate."""
    if only_read:
        yield from broken(MODEL_RULES, policy, key)
    else:
        yield from collect_problems(policy, key)
        yield from broken(POLICY_RULES, policy, key)


def checked_policy(given: PolicyConfig | Mapping[str, object], *, only_read: bool = False) -> PolicyConfig:
    """Return a policy, or build it from a mapping, and raise ConfigError with every rule that it breaks.

    A mapping is first filled from its `model_name`. only_read: apply only the rules for a model that is neither trained
    nor used to generate.
    """
    if not isinstance(given, PolicyConfig):
        section, problems = fill_from_model_name(given)
        if problems:
            raise ConfigError(problems)
        given = PolicyConfig.model_validate(section)
    if wrong := tuple(one for one in policy_problems(given, only_read=only_read) if not one.warns):
        raise ConfigError(wrong)
    return given
