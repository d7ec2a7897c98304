"""What a reader of a run should look at first, in words: eight rules, each of which reads the rows of metrics.

A rule says nothing where its metric is not logged. They ask for a look, no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nemo_rl_mcore.driver.observability.sinks import Row
from nemo_rl_mcore.tools.report.run_data import WINDOW, RunData, mean

# Of its first value, since nats depend on vocabulary and task. From 1 nat on, a tenth is a choice of two at 98 to 2.
_COLLAPSED_ENTROPY = 0.1
# Of the highest reward that any answer had. Where nearly all answers reach it, entropy and spread fall for a reason.
_LEARNT = 0.9
# Mean of exp|engine - training| over tokens, 1 where they agree: 5 % a token multiply to 130 over 100 tokens at worst.
_LARGE_MISMATCH = 1.05
# Effective sample size, a share of the tokens: below a half, most of what was sampled is not trained on.
_SMALL_SAMPLE = 0.5
# A share of the answers: from a quarter on, a group of four has one that is judged by its length, on average.
_MANY_TRUNCATED = 0.25
# Shares of a reward's range and of its best by which it is below its best: noise of a tenth of the reward stays inside.
_FALL, _NOISE = 0.2, 0.1


@dataclass(frozen=True)
class Hint:
    """Something to look at; panel: the metric whose picture shows it."""

    text: str
    panel: str = ""


def findings_of(run: RunData) -> list[Hint]:
    """Return all of them."""
    found = [*_of_the_end(run), *(Hint(line) for line in run.unread)]
    if run.rows:
        found += [hint for rule in _RULES if (hint := rule(run.rows)) is not None]
    return found


def finite_points(rows: Iterable[Row], name: str) -> list[tuple[float, float]]:
    """Step and value of a metric, of the rows in which it is finite."""
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [value for _, value in finite_points(rows, name)]


def _of_the_end(run: RunData) -> Iterator[Hint]:
    total, last, at = run.total_steps, run.last_step, run.written_at
    if (run.rows or at) and total is not None and last < total:
        when = f"; its last row was written on {at:%Y-%m-%d at %H:%M}" if run.rows and at else ""
        yield Hint(f"The run has {last} of {total} steps{when}. Is it still at work?")


def _not_finite(rows: Sequence[Row]) -> Hint | None:
    for name in ("train/loss", "train/grad_norm"):
        steps = [int(row["step"]) for row in rows if name in row and not math.isfinite(row[name])]
        if steps:
            first = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
            where = f"step {first}" if len(steps) == 1 else f"{len(steps)} steps ({first})"
            return Hint(f"{name} is not finite in {where}: those updates were skipped or lost.", name)
    skipped = _values(rows, "train/skipped_steps")[-1:]
    if skipped and skipped[0]:
        return Hint(
            f"{skipped[0]:.0f} steps had no update: their gradient was not finite.", "train/grad_norm"
        )
    return None


def _is_learnt(rows: Sequence[Row]) -> bool:
    """Return whether nearly all answers of the last steps have the highest reward that any answer had."""
    rewards, highest = _values(rows, "train/reward")[-WINDOW:], _values(rows, "train/reward_max")
    if not rewards or not highest:
        return False
    # From 0 on, or from the lowest one where rewards are costs.
    low, high = min(0.0, *_values(rows, "train/reward_min")), max(highest)
    return high > low and mean(rewards) >= low + _LEARNT * (high - low)


def _equal_rewards(rows: Sequence[Row]) -> Hint | None:
    of_steps = [row for row in rows if "train/reward_min" in row]
    equal = [*takewhile(lambda row: row["train/reward_min"] == row["train/reward_max"], reversed(of_steps))]
    if len(equal) < WINDOW or _is_learnt(rows):
        return None
    return Hint(
        f"All answers of the last {len(equal)} steps have the reward {equal[0]['train/reward_min']:.4g}, which teaches "
        "nothing: read some of them below.",
        "train/reward_std",
    )


def _entropy(rows: Sequence[Row]) -> Hint | None:
    values = _values(rows, "train/entropy")
    if len(values) < 2 * WINDOW or _is_learnt(rows):
        return None
    first, last = mean(values[:WINDOW]), mean(values[-WINDOW:])
    if first <= 0 or last >= _COLLAPSED_ENTROPY * first:
        return None
    return Hint(
        f"Entropy has collapsed, from {first:.3g} to {last:.3g} nats a token, and the reward is not high: the policy "
        "hardly explores any more. Lower the learning rate, or raise the KL penalty or the upper clip.",
        "train/entropy",
    )


def _truncated(rows: Sequence[Row]) -> Hint | None:
    last = _values(rows, "train/truncation_rate")[-WINDOW:]
    if not last or mean(last) < _MANY_TRUNCATED:
        return None
    return Hint(
        f"{mean(last):.0%} of the answers of the last steps were cut off: policy.generation.max_new_tokens is short "
        "for them, or they do not end.",
        "train/truncation_rate",
    )


def _mismatch(rows: Sequence[Row]) -> Hint | None:
    name = "train/token_mult_prob_error"
    # Answers of older weights differ rightly, see `_stale`.
    values = _values([row for row in rows if not row.get("async/age_max")], name)
    if not values or max(values) < _LARGE_MISMATCH:
        return None
    above = sum(value >= _LARGE_MISMATCH for value in values)
    return Hint(
        f"Engine and training disagree: by a factor of {max(values):.4g} a token at worst, and by {_LARGE_MISMATCH} or "
        f"more in {above} of {len(values)} steps. See policy.generation.mismatch.",
        name,
    )


def _fallen(rows: Sequence[Row]) -> Hint | None:
    """Return a reward that was higher: validations where there are some, else means of windows."""
    name = next(
        (name for name in ("validation/reward", "train/reward") if len(_values(rows, name)) > 2), None
    )
    if name is None:
        return None
    points, width = finite_points(rows, name), 1 if name.startswith("validation/") else WINDOW
    values = [value for _, value in points]
    means = [(points[i - 1][0], mean(values[i - width : i])) for i in range(width, len(values) + 1)]
    if not means:
        return None
    step, best = max(means, key=lambda point: point[1])
    last, lowest = means[-1][1], min(value for _, value in means)
    if best - last <= max(_FALL * (best - lowest), _NOISE * abs(best), 1e-6):
        return None
    return Hint(f"{name} was {best:.4g} at step {int(step)} and is {last:.4g} now.", name)


def _stale(rows: Sequence[Row]) -> Hint | None:
    values = _values(rows, "async/ess")
    if not values or min(values) >= _SMALL_SAMPLE:
        return None
    return Hint(
        f"The importance weights leave an effective sample of {min(values):.0%} of the tokens at worst: answers are "
        "old, or the weights move fast (max_trajectory_age_steps, the learning rate).",
        "async/ess",
    )


_RULES: tuple[Callable[[Sequence[Row]], Hint | None], ...] = (
    *(_not_finite, _equal_rewards, _entropy, _mismatch, _fallen, _truncated, _stale),
)
