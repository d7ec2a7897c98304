"""Requirements for surviving the loss of ranks and machines, and for writing checkpoints."""

from nemo_rl_mcore.config.base import Rule, Rules
from nemo_rl_mcore.config.run_config import RunConfig

_RESTARTS = "cluster.max_trainer_restarts"
_CHECKPOINTS, _METRIC = "checkpointing.enabled", "checkpointing.metric_name"


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
)
