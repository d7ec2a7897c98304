"""Which metrics are drawn, what belongs together in one panel, and what a reader may want to know of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_rl_mcore.driver.observability.series import shown_in

Row = Mapping[str, float]
"""The metrics of one step, with its number under "step"."""


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn over the steps in one picture; group: the heading under which it stands."""

    title: str
    metrics: tuple[str, ...]
    group: str
    note: str = ""

    @property
    def heading(self) -> str:
        """Return the title, which is the metric's name where there is one only."""
        only, *others = self.metrics
        return self.title if others else only


def _group(name: str, *panels: tuple[str, tuple[str, ...], str]) -> tuple[Panel, ...]:
    return tuple(Panel(title, metrics, name, note) for title, metrics, note in panels)


PANELS = (
    *_group(
        "Learning",
        ("reward", ("train/reward", "validation/reward"), ""),
        ("accuracy", ("validation/accuracy",), "Share of held-out answers with full marks."),
        ("preference accuracy", ("train/preference_accuracy", "validation/preference_accuracy"), ""),
        (
            "rewards of pairs",
            (
                *("train/rewards_chosen_mean", "train/rewards_rejected_mean", "train/rewards_margin_mean"),
                "validation/rewards_margin_mean",
            ),
            "The margin should grow; a chosen reward that falls with the rejected one is a warning.",
        ),
        ("loss", ("train/loss", "validation/loss"), "Of GRPO and PPO it need not fall: the reward tells."),
        ("gradient norm", ("train/grad_norm",), "Before it is clipped."),
        ("learning rate", ("train/lr",), ""),
    ),
    *_group(
        "Stability",
        ("entropy", ("train/entropy",), "Nats a token. Near 0 the policy no longer explores."),
        ("divergence from the reference", ("train/kl_penalty",), "Nats a token."),
        (
            "engine and training",
            ("train/token_mult_prob_error",),
            "By what factor the engine's probability of a token is off; 1 is right, above 1.05 is not.",
        ),
        ("clipped ratios", ("train/probs_ratio_clipfrac",), ""),
    ),
    *_group(
        "Responses",
        (
            "spread of rewards",
            ("train/reward_std", "train/reward_std_within_groups"),
            "A group whose answers have one reward teaches GRPO nothing.",
        ),
        ("response length", ("train/mean_gen_tokens_per_sample", "train/max_gen_tokens_per_sample"), ""),
        ("truncated responses", ("train/truncation_rate",), ""),
    ),
    *_group(
        "Asynchronous rollouts",
        ("age of the tokens", ("async/age_mean", "async/age_max"), "Optimizer steps behind the weights."),
        ("groups under way", ("async/buffer_ready", "async/inflight"), ""),
        ("idle, share of a step", ("async/trainer_idle", "async/engine_idle"), ""),
        (
            "importance weights, responses",
            ("async/ess", "async/mixed_versions"),
            "Effective sample size, a share of the tokens; and of responses that several versions sampled.",
        ),
    ),
    *_group(
        "Speed",
        ("tokens/s", ("performance/tokens_per_sec",), ""),
        ("seconds a step", ("timing/total",), ""),
        ("memory, GiB", ("performance/peak_memory_gib", "performance/value_peak_memory_gib"), ""),
    ),
)
DRAWN_METRICS = tuple(name for panel in PANELS for name in panel.metrics)
_UNKNOWN = 6
"""Metrics that are drawn of rows in which none is known."""


def curve_panels(rows: Iterable[Row]) -> list[Panel]:
    """Return the panels with those metrics that the rows have; of unknown ones, the first metrics."""
    rows = list(rows)
    shown = shown_in(rows)
    of_rows = [
        replace(panel, metrics=names)
        for panel in PANELS
        if (names := tuple(name for name in panel.metrics if name in shown))
    ]
    return of_rows or [Panel(name, (name,), "Metrics") for name in _names(rows, shown)[:_UNKNOWN]]


def points_of(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric, of the rows that have it."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def finite_points(rows: Iterable[Row], name: str) -> list[tuple[float, float]]:
    """Step and value of a metric, of the rows in which it is finite."""
    return [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]


def finite_values(rows: Iterable[Row], name: str) -> list[float]:
    """Return the values of a metric that are finite."""
    return [value for _, value in finite_points(rows, name)]


def _names(rows: Sequence[Row], shown: frozenset[str]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name in shown and name != "step"))
