"""What a reader of a run should look at first, in words: each rule reads the rows of metrics.

A rule says nothing where its metric is not logged. Thresholds are rules of thumb: they ask for a look, no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Literal

from nemo_rl_mcore.driver.observability.curves import Row, finite_points, finite_values, points_of
from nemo_rl_mcore.tools.report.run_data import WINDOW, RunData, mean

_COLLAPSED_ENTROPY = 0.1
"""Share of the first entropy below which hardly anything is explored any more."""
_LEARNT = 0.9
"""Share of the highest reward of any answer."""
_LARGE_MISMATCH = 1.05
_SMALL_SAMPLE = 0.5
"""Effective sample size, as a share of the tokens."""
_MUCH_WAITING = 0.3
_SPIKE = 50.0
"""Times the median gradient norm."""
_FALL = 0.2
"""Share of the range of a reward by which it is below its best."""
_NOISE = 0.1
"""Share of the best reward by which a reward that neither rises nor falls may be below it."""

_WAITERS = {
    "trainer": "Training waits for answers",
    "engine": "The engines have no prompt that they may answer yet",
}

Level = Literal["warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something to look at; panel: the metric whose picture shows it."""

    level: Level
    text: str
    panel: str = ""


def findings_of(run: RunData) -> list[Finding]:
    """Return all of them, warnings first."""
    found = [*_of_the_end(run), *(Finding("warning", line) for line in run.unread)]
    if run.rows:
        found += [finding for rule in _RULES if (finding := rule(run.rows)) is not None]
    return sorted(found, key=lambda finding: finding.level != "warning")


def _of_the_end(run: RunData) -> Iterator[Finding]:
    total, last, at = run.total_steps, run.last_step, run.written_at
    if (run.rows or at) and total is not None and last < total:
        when = f"; its last row was written on {at:%Y-%m-%d at %H:%M}" if run.rows and at else ""
        yield Finding("warning", f"The run has {last} of {total} steps{when}. Is it still at work?")


def _ends(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Return the means over the first and the last steps; None with fewer than two windows of them."""
    values = finite_values(rows, name)
    if len(values) < 2 * WINDOW:
        return None
    return mean(values[:WINDOW]), mean(values[-WINDOW:])


def _not_finite(rows: Sequence[Row]) -> Finding | None:
    for name in ("train/loss", "train/grad_norm"):
        steps = [
            int(step) for step, value in zip(*points_of(rows, name), strict=True) if not math.isfinite(value)
        ]
        if steps:
            return Finding(
                "warning",
                f"{name} is not finite in {_steps(steps)}: those updates were skipped or lost.",
                name,
            )
    return None


def _is_learnt(rows: Sequence[Row]) -> bool:
    """Return whether nearly all answers of the last steps have the highest reward that any answer had."""
    rewards, highest = finite_values(rows, "train/reward")[-WINDOW:], finite_values(rows, "train/reward_max")
    if not rewards or not highest:
        return False
    # From 0 on, or from the lowest one where rewards are costs.
    low, high = min(0.0, *finite_values(rows, "train/reward_min")), max(highest)
    return high > low and mean(rewards) >= low + _LEARNT * (high - low)


def _equal_rewards(rows: Sequence[Row]) -> Finding | None:
    of_steps = [row for row in rows if "train/reward_min" in row]
    equal = [*takewhile(lambda row: row["train/reward_min"] == row["train/reward_max"], reversed(of_steps))]
    if len(equal) < WINDOW or _is_learnt(rows):
        return None
    return Finding(
        "warning",
        f"All answers of the last {len(equal)} steps have the reward {equal[0]['train/reward_min']:.4g}, which teaches "
        "nothing: read some of them below.",
        "train/reward_std",
    )


def _entropy(rows: Sequence[Row]) -> Finding | None:
    ends = _ends(rows, "train/entropy")
    if ends is None or ends[0] <= 0 or ends[1] >= _COLLAPSED_ENTROPY * ends[0]:
        return None
    fell = f"from {ends[0]:.3g} to {ends[1]:.3g} nats a token"
    if _is_learnt(rows):
        return Finding("note", f"Entropy fell {fell}, and the task is learnt.", "train/entropy")
    return Finding(
        "warning",
        f"Entropy has collapsed, {fell}, and the reward is not high: the policy hardly explores any more. Lower the "
        "learning rate, or raise the KL penalty or the upper clip.",
        "train/entropy",
    )


@dataclass(frozen=True)
class _HighAtLast:
    """A rule: the mean of a metric over the last steps is at least this; text: what is said of it."""

    metric: str
    least: float
    level: Level
    text: str

    def __call__(self, rows: Sequence[Row]) -> Finding | None:
        last = finite_values(rows, self.metric)[-WINDOW:]
        if not last or mean(last) < self.least:
            return None
        return Finding(self.level, self.text.format(mean(last)), self.metric)


_kl = _HighAtLast(
    "train/kl_penalty", 1.0, "warning", "The policy is {:.3g} nats a token away from its reference."
)
_truncated = _HighAtLast(
    "train/truncation_rate",
    0.25,
    "warning",
    "{:.0%} of the answers of the last steps were cut off: policy.generation.max_new_tokens is short for them, or they "
    "do not end.",
)
_clipped = _HighAtLast(
    "train/probs_ratio_clipfrac", 0.3, "note", "{:.0%} of the tokens are clipped: the steps are large."
)


def _mismatch(rows: Sequence[Row]) -> Finding | None:
    name = "train/token_mult_prob_error"
    # Answers of older weights differ rightly, see `_stale`.
    values = finite_values([row for row in rows if not row.get("async/age_max")], name)
    if not values or max(values) < _LARGE_MISMATCH:
        return None
    above = sum(value >= _LARGE_MISMATCH for value in values)
    return Finding(
        "warning",
        f"Engine and training disagree: by a factor of {max(values):.4g} a token at worst, and by {_LARGE_MISMATCH} or "
        f"more in {above} of {len(values)} steps. See policy.generation.mismatch.",
        name,
    )


def _spikes(rows: Sequence[Row]) -> Finding | None:
    name = "train/grad_norm"
    points = finite_points(rows, name)
    if len(points) < WINDOW:
        return None
    usual, (step, highest) = median(value for _, value in points), max(points, key=lambda point: point[1])
    if usual <= 0 or highest < _SPIKE * usual:
        return None
    return Finding(
        "note",
        f"The gradient norm of step {int(step)}, {highest:.3g}, is {highest / usual:.0f} times the median.",
        name,
    )


def _fallen(rows: Sequence[Row]) -> Finding | None:
    """Return a reward that was higher: validations where there are some, else means of windows."""
    name = next(
        (name for name in ("validation/reward", "train/reward") if len(finite_values(rows, name)) > 2), None
    )
    if name is None:
        return None
    points = finite_points(rows, name)
    values = [value for _, value in points]
    width = 1 if name.startswith("validation/") else WINDOW
    means = [(points[i - 1][0], mean(values[i - width : i])) for i in range(width, len(values) + 1)]
    if not means:
        return None
    step, best = max(means, key=lambda point: point[1])
    last, lowest = means[-1][1], min(mean for _, mean in means)
    if best - last <= max(_FALL * (best - lowest), _NOISE * abs(best), 1e-6):
        return None
    return Finding("warning", f"{name} was {best:.4g} at step {int(step)} and is {last:.4g} now.", name)


def _stale(rows: Sequence[Row]) -> Finding | None:
    values = finite_values(rows, "async/ess")
    if not values or min(values) >= _SMALL_SAMPLE:
        return None
    return Finding(
        "warning",
        f"The importance weights leave an effective sample of {min(values):.0%} of the tokens at worst: answers are "
        "old, or the weights move fast (max_trajectory_age_steps, the learning rate).",
        "async/ess",
    )


def _waiting(rows: Sequence[Row]) -> Finding | None:
    waits = {name: finite_values(rows, f"async/{name}_idle") for name in ("trainer", "engine")}
    found = [(median(values), name) for name, values in waits.items() if values]
    if not found or max(found)[0] < _MUCH_WAITING:
        return None
    share, name = max(found)
    return Finding("note", f"{_WAITERS[name]}, {share:.0%} of a step.", f"async/{name}_idle")


def _skipped(rows: Sequence[Row]) -> Finding | None:
    last = finite_values(rows, "train/skipped_steps")[-1:]
    if not last or not last[0]:
        return None
    return Finding(
        "warning", f"{last[0]:.0f} steps had no update: their gradient was not finite.", "train/grad_norm"
    )


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return (
        f"step {shown}"
        if len(steps) == 1
        else f"{len(steps)} steps ({shown}{', ...' if len(steps) > 5 else ''})"
    )


_RULES: tuple[Callable[[Sequence[Row]], Finding | None], ...] = (
    *(_not_finite, _skipped, _equal_rewards, _entropy, _kl, _mismatch),
    *(_fallen, _truncated, _stale, _spikes, _clipped, _waiting),
)
