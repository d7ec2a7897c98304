"""What a checkpoint needs of the run that writes it."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

_OPTIMIZER = "policy.megatron_cfg.optimizer"


def _ranked_by_a_validation(config: RunConfig) -> Iterator[Problem]:
    section, period = config.checkpointing, config.loop.val_period
    by_validation = section.enabled and (section.metric_name or "").startswith("val:")
    if by_validation and (not period or section.save_period % period):
        yield Problem(
            "requires",
            "checkpointing.metric_name",
            f"{section.metric_name} needs a validation at each checkpoint, and checkpointing.save_period: "
            f"{section.save_period} is no multiple of {config.algorithm}.val_period: {period}",
            "change one of the two, or rank by a train: metric",
            ("checkpointing.save_period", f"{config.algorithm}.val_period"),
        )


def _optimizer_state(config: RunConfig) -> Iterator[Problem]:
    for plan in config.models.values():
        if config.checkpointing.enabled and plan.trained:
            yield from map(plan.in_recipe, _sharded_sgd(plan.policy))


def _sharded_sgd(policy: PolicyConfig) -> Iterator[Problem]:
    optimizer = policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield Problem(
            "incompatible",
            f"{_OPTIMIZER}.use_distributed_optimizer",
            "true with optimizer: sgd cannot be saved, for which checkpointing.enabled: true asks",
            "set use_distributed_optimizer: false",
            ("checkpointing.enabled", f"{_OPTIMIZER}.optimizer"),
        )


RULES = Rules(of_runs=(_ranked_by_a_validation, _optimizer_state))
