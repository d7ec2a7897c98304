"""Learning rates of a rehearsal: the recipe's schedules, raised so that two steps move the weights."""

from __future__ import annotations

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.config.master import PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.tools.rehearse.schedule import Schedule
from nemo_rl_mcore.tools.rehearse.shrink import STEPS, Small, put, rollout_steps

_RATE = 1e-3
"""Highest learning rate of the two steps: one that moves float32 weights by far more than they are rounded."""
_EPSILON = 1e-6
"""Of Adam at least. A smaller one divides gradients that are 0 but for rounding, as of key biases, by their size."""


def raise_rates(small: Small, config: RunConfig, schedule: Schedule) -> float:
    """Multiply all rates of the policy, and all of PPO's critic, by a factor each, and return that of the policy.

    config: the shrunk recipe. schedule: the policy's, as the recipe states it.
    """
    factor = _factor(schedule, config)
    _scale(small, "policy.megatron_cfg", factor)
    if isinstance(config, PPOMasterConfig):
        _scale(small, "value", _factor(Schedule.of(config.value.optimizer, config.value.scheduler), config))
    return factor


def _factor(schedule: Schedule, config: RunConfig) -> float:
    steps = STEPS * rollout_steps(config) * getattr(config.loop, "ppo_epochs", 1)
    return _RATE / (max(schedule.rate(step) for step in range(max(2, steps))) or schedule.peak)


def _scale(small: Small, model: str, factor: float) -> None:
    for key in ("optimizer.lr", "optimizer.min_lr", "scheduler.lr_warmup_init"):
        path = f"{model}.{key}"
        value = value_at(small.tree, path)
        if isinstance(value, int | float):
            put(small.tree, path, value * factor)
            small.why[path] = f"all its rates times {factor:.6g}; the schedule keeps its shape"
    path = f"{model}.optimizer.adam_eps"
    epsilon = value_at(small.tree, path)
    if isinstance(epsilon, float) and epsilon < _EPSILON:
        put(small.tree, path, _EPSILON)
        small.why[path] = "a smaller one lets rounding alone move weights"
