"""A schedule's learning rate in closed form, from a recipe's keys alone.

It shares no code with training, so that the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.config.master import PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.shrink import STEPS, Small, rollout_steps


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule, and the optimizer steps that advance it by one.

    steps_per_tick: 1 here; in NeMo RL the optimizer steps of a whole `train` call.
    """

    peak: float
    lowest: float = 0.0
    style: str = "constant"
    warmup: float = 0
    start: float = 0.0
    end: float | None = None
    steps_per_tick: int = 1

    @classmethod
    def of(cls, section: Mapping[str, Any], steps_per_tick: int = 1) -> Schedule:
        """Return the schedule of a section with `optimizer` and `scheduler`, as a dict."""
        optimizer, scheduler = section["optimizer"], section["scheduler"]
        return cls(
            float(optimizer["lr"]),
            float(optimizer.get("min_lr") or 0.0),
            scheduler.get("lr_decay_style", "constant"),
            scheduler.get("lr_warmup_iters") or 0,
            float(scheduler.get("lr_warmup_init") or 0.0),
            scheduler.get("lr_decay_iters"),
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
"""The two steps' highest learning rate: it moves float32 weights by far more than a rounding error."""
_EPSILON = 1e-6
"""Adam's least epsilon. With a smaller one, gradients that are 0 except for rounding (key biases) move weights."""


def raise_rates(small: Small, config: RunConfig, schedule: Schedule) -> float:
    """Multiply the policy's rates by one factor, and those of PPO's critic by another; return the policy's factor.

    config: the shrunk recipe. schedule: the policy's, before shrinking.
    """
    steps = STEPS * rollout_steps(config) * getattr(config.loop, "ppo_epochs", 1)
    schedules, factors = {"policy.megatron_cfg": schedule}, dict[str, float]()
    if isinstance(config, PPOMasterConfig):
        schedules["value"] = Schedule.of(config.value.model_dump())
    for model, one in schedules.items():
        highest = max(one.rate(step) for step in range(max(2, steps))) or one.peak
        factors[model] = factor = _RATE / highest
        for key in ("optimizer.lr", "optimizer.min_lr", "scheduler.lr_warmup_init"):
            path = f"{model}.{key}"
            value = value_at(small.tree, path)
            if isinstance(value, int | float):
                put(small.tree, path, value * factor)
                small.why[path] = f"all its rates times {factor:.6g}; the schedule's shape stays"
        path = f"{model}.optimizer.adam_eps"
        epsilon = value_at(small.tree, path)
        if isinstance(epsilon, float) and epsilon < _EPSILON:
            put(small.tree, path, _EPSILON)
            small.why[path] = "with a smaller one, rounding alone would move weights"
    return factors["policy.megatron_cfg"]
