"""Measure what only asynchronous steps report: how old their tokens are, and which side waited for the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.episode_rows import EpisodeRows
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS


def age_metrics(batches: Sequence[BatchedDataDict], version: int, max_age: int) -> dict[str, float]:
    """Count the training steps by which the weights that sampled each token are behind `version`.

    batches: the chunks of a step; the versions of their tokens are weight_versions [B, S].

    async/age_<k> are shares of the tokens; async/mixed_versions is that of responses sampled by several versions.
    """
    drawn = [batch[WEIGHT_VERSIONS] for batch in batches]
    ages = torch.cat([(version - versions_BS)[versions_BS >= 0] for versions_BS in drawn])
    mixed = torch.cat([_mixed(batch) for batch in batches])
    shares = {f"async/age_{age}": float((ages == age).float().mean()) for age in range(max_age + 1)}
    return shares | {
        "async/age_mean": float(ages.float().mean()),
        "async/age_max": float(ages.max()),
        "async/mixed_versions": float(mixed.float().mean()),
    }


def _mixed(batch: BatchedDataDict) -> Tensor:
    """Return bool [E], the responses that weights of several versions sampled."""
    versions_ES = EpisodeRows.of(batch).joined(batch[WEIGHT_VERSIONS], fill=-1)
    newest = torch.iinfo(versions_ES.dtype).max
    return versions_ES.masked_fill(versions_ES < 0, newest).amin(1) < versions_ES.amax(1)


def correction_metrics(table: Tensor) -> dict[str, float]:
    """Measure how far the weights that train are from those that sampled, from the `sampler_table` of the trained rows.

    async/ess: effective sample size of the importance weights, as a share of the tokens; NaN where all of them are 0.
    async/behaviour_kl: the k3 estimate (https://joschu.net/blog/kl-approx.html) of the divergence of the weights that
    train from those that sampled.
    """
    tokens, _, _, ratio, ratio_squares, behaviour_kl = (float(total) for total in table[:, :-1].sum(0))
    if not tokens:
        return {}
    return {
        "async/ess": ratio / ratio_squares * ratio / tokens if ratio_squares else float("nan"),
        "async/importance_ratio_max": float(table[:, -1].max()),
        "async/behaviour_kl": behaviour_kl / tokens,
    }


@dataclass
class Pace:
    """Counts how the two sides of a run got on since the last step.

    began_at: when that one ended, by the monotonic clock. requeued, dropped: groups whose attempt ended without
    answers, by reason. trainer_idle_s: training waited for groups, to train on them or for them to end before an
    update. engine_idle_s: no group was in flight. ready, in_flight: groups at the end of the step. engine_restarts:
    since the run began.
    """

    began_at: float = field(default_factory=time.monotonic)
    requeued: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    trainer_idle_s: float = 0.0
    engine_idle_s: float = 0.0
    ready: int = 0
    in_flight: int = 0
    engine_restarts: int = 0
    rounds: int = 0
    """Times that groups were asked for in one call."""
    unused: int = 0
    """Groups that were answered and that dynamic sampling does not train on."""


def sampling_metrics(pace: Pace, groups_per_step: int) -> dict[str, float]:
    """Return what dynamic sampling took to fill a step: rounds, where it asks in rounds, and the share it trains on."""
    rounds = {"train/dynamic_sampling_rounds": float(pace.rounds)} if pace.rounds else {}
    kept = groups_per_step / (groups_per_step + pace.unused)
    return {**rounds, "train/dynamic_sampling_kept": kept}


def pace_metrics(pace: Pace, now: float) -> dict[str, float]:
    """Return the shares of the time since the last step in which one side waited, and what is under way now.

    now: by the clock of `pace.began_at`.
    """
    step_s = now - pace.began_at
    return {
        "async/trainer_idle": pace.trainer_idle_s / step_s,
        "async/engine_idle": pace.engine_idle_s / step_s,
        "async/buffer_ready": float(pace.ready),
        "async/inflight": float(pace.in_flight),
        **({"async/engine_restarts": float(pace.engine_restarts)} if pace.engine_restarts else {}),
        **{f"async/requeued/{reason}": float(count) for reason, count in pace.requeued.items()},
        **{f"async/dropped/{reason}": float(count) for reason, count in pace.dropped.items()},
    }
