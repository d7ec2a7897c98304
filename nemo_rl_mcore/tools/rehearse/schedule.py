"""The learning rate of a schedule in closed form, from the keys of a recipe alone.

Nothing here is shared with what trains: it is written once more from the formulas, to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.master import PPOMasterConfig
from nemo_rl_mcore.config.megatron import OptimizationConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.shrink import STEPS, Small, rollout_steps


@dataclass(frozen=True)
class Schedule:
    """A schedule, and how many optimizer steps advance it by one.

    steps_per_tick: 1 here; in NeMo RL the optimizer steps of a whole call of `train`.
    """

    peak: float
    lowest: float = 0.0
    style: str = "constant"
    warmup: float = 0
    start: float = 0.0
    end: float | None = None
    steps_per_tick: int = 1

    @classmethod
    def of(cls, section: OptimizationConfig) -> Schedule:
        """Return that of a policy or a critic of this package."""
        return cls._of(section.optimizer.model_dump(), section.scheduler.model_dump())

    @classmethod
    def of_nemo_rl(cls, tree: Tree, steps_per_tick: int) -> Schedule | None:
        """Return that of a recipe of NeMo RL as it was read; None where its backend has no such section."""
        section = value_at(tree, "policy.megatron_cfg")
        megatron = cast("Mapping[str, Any]", section) if isinstance(section, dict) else {}
        optimizer, scheduler = megatron.get("optimizer"), megatron.get("scheduler")
        if not megatron.get("enabled") or not isinstance(optimizer, dict) or not isinstance(scheduler, dict):
            return None
        return cls._of(cast("Tree", optimizer), cast("Tree", scheduler), steps_per_tick)

    @classmethod
    def _of(cls, peak: Mapping[str, Any], shape: Mapping[str, Any], steps_per_tick: int = 1) -> Schedule:
        return cls(
            float(peak["lr"]),
            float(peak.get("min_lr") or 0.0),
            shape.get("lr_decay_style", "constant"),
            shape.get("lr_warmup_iters") or 0,
            float(shape.get("lr_warmup_init") or 0.0),
            shape.get("lr_decay_iters"),
            steps_per_tick,
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        ticks = step / self.steps_per_tick
        if self.warmup and ticks <= self.warmup:
            return self.start + (self.peak - self.start) * ticks / self.warmup
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            warmup = max(self.warmup, 1)
            return max(self.lowest, self.peak * math.sqrt(warmup) / math.sqrt(max(ticks, 1)))
        assert self.end is not None
        done = min(1.0, (ticks - self.warmup) / (self.end - self.warmup))
        left = 1 - done if self.style == "linear" else (math.cos(math.pi * done) + 1) / 2
        return self.lowest + (self.peak - self.lowest) * left


_RATE = 1e-3
"""Highest learning rate of the two steps: one that moves float32 weights by far more than they are rounded."""
_EPSILON = 1e-6
"""Of Adam at least. A smaller one divides gradients that are 0 but for rounding, as of key biases, by their size."""


def raise_rates(small: Small, config: RunConfig, schedule: Schedule) -> float:
    """Multiply all rates of the policy, and all of PPO's critic, by a factor each, and return that of the policy.

    config: the shrunk recipe. schedule: the policy's, as the recipe states it.
    """
    steps = STEPS * rollout_steps(config) * getattr(config.loop, "ppo_epochs", 1)
    schedules, factors = {"policy.megatron_cfg": schedule}, dict[str, float]()
    if isinstance(config, PPOMasterConfig):
        schedules["value"] = Schedule.of(config.value)
    for model, one in schedules.items():
        highest = max(one.rate(step) for step in range(max(2, steps))) or one.peak
        factors[model] = factor = _RATE / highest
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
    return factors["policy.megatron_cfg"]
