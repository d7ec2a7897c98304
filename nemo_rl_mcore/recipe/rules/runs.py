"""Rules of a recipe: within sections, between sections, and for models besides the policy."""

from collections.abc import Iterator
from functools import partial

from nemo_rl_mcore.config.base import (
    Key,
    Problem,
    Rule,
    Rules,
    broken,
    collect_problems,
    join_path,
)
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig
from nemo_rl_mcore.recipe.rules import (
    batching,
    generation,
    losses,
    model,
    parallelism,
    prompts,
    rollouts,
)
from nemo_rl_mcore.recipe.rules.policies import POLICY_RULES, policy_problems

_RESTARTS = "cluster.max_trainer_restarts"
_CHECKPOINTS, _METRIC = "checkpointing.enabled", "checkpointing.metric_name"

RUN_RULES: Rules[RunConfig] = (
    *parallelism.RUN_RULES,
    *batching.RUN_RULES,
    *prompts.RUN_RULES,
    *generation.RUN_RULES,
    *losses.RUN_RULES,
    *rollouts.RUN_RULES,
    Rule(
        "requires",
        _METRIC,
        lambda run: (
            run.checkpointing.enabled
            and (run.checkpointing.metric_name or "").startswith("val:")
            and (not run.loop.val_period or run.checkpointing.save_period % run.loop.val_period)
        ),
        ("checkpointing.save_period", "loop.val_period"),
        "make save_period a multiple of val_period, or rank by a train: metric",
        "it needs a validation metric at each checkpoint",
    ),
    Rule(
        "requires",
        _RESTARTS,
        lambda run: run.cluster.max_trainer_restarts and not run.checkpointing.enabled,
        (_CHECKPOINTS,),
        {_CHECKPOINTS: True, _RESTARTS: 0},
        "restarted ranks continue from the last checkpoint",
    ),
    *model.RUN_RULES,
)


_OF_POLICY: Key = partial(join_path, "policy")


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems within and between a recipe's sections, for all its models."""
    yield from collect_problems(config)
    yield from broken((*POLICY_RULES, *generation.ENGINE_RULES), config.policy, _OF_POLICY)
    yield from broken(RUN_RULES, config, config.key)
    for plan in config.models.values():
        if plan.policy is not config.policy:
            yield from _second_model_problems(config, plan)


def _second_model_problems(config: RunConfig, plan: ModelPlan) -> Iterator[Problem]:
    """Yield problems of a second model under a policy's rules, except those reported for its own section."""
    own_section = collect_problems(getattr(config, plan.name), partial(join_path, plan.name))
    told = {*policy_problems(config.policy, _OF_POLICY), *own_section}
    shared_paths = policy_problems(plan.policy, _OF_POLICY, only_read=not plan.trained)
    own_paths = policy_problems(
        plan.policy, lambda path: plan.key(_OF_POLICY(path)), only_read=not plan.trained
    )
    for own, shared in zip(own_paths, shared_paths, strict=True):
        if own not in told and not (shared in told and own.path == shared.path):
            yield own
