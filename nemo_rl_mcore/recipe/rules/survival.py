"""What a run needs to survive the loss of ranks and machines, and what a checkpoint needs of the run."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Rule, Rules
from nemo_rl_mcore.config.run_config import RunConfig

_RESTARTS = "cluster.max_trainer_restarts"
_CHECKPOINTS, _METRIC = "checkpointing.enabled", "checkpointing.metric_name"


def _saved_optimizers(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield optimizers of models that are trained whose state cannot be saved."""
    for plan in config.models.values():
        optimizer, path = plan.policy.megatron_cfg.optimizer, plan.key("policy.megatron_cfg.optimizer")
        sharded = optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer
        yield Rule(
            "incompatible",
            f"{path}.use_distributed_optimizer",
            config.checkpointing.enabled and plan.trained and sharded,
            (_CHECKPOINTS, f"{path}.optimizer"),
            {f"{path}.use_distributed_optimizer": False},
            "the sharded state of sgd cannot be saved",
        )


RUN_RULES: Rules[RunConfig] = (
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
        "it needs a validation at each checkpoint",
    ),
    Rule(
        "requires",
        _RESTARTS,
        lambda run: run.cluster.max_trainer_restarts and not run.checkpointing.enabled,
        (_CHECKPOINTS,),
        {_CHECKPOINTS: True, _RESTARTS: 0},
        "new ranks begin at the last checkpoint",
    ),
    _saved_optimizers,
)
