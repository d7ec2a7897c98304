"""What an asynchronous step reports beside what every step does: how old its tokens are, and who waited for whom."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_mcore.algorithms.episode_rows import EpisodeRows
from nemo_rl_mcore.algorithms.episodes import WEIGHT_VERSIONS
from nemo_rl_mcore.data import BatchedDataDict


def age_metrics(batch: BatchedDataDict, version: int, max_age: int) -> dict[str, float]:
    """Count the training steps by which the weights that sampled each token are behind `version`.

    The token's own are weight_versions [B, S].

    async/age_<k> are shares of the tokens; async/mixed_versions is that of the responses which several versions drew.
    """
    versions_BS = batch[WEIGHT_VERSIONS]
    drawn_BS = versions_BS >= 0
    ages = (version - versions_BS)[drawn_BS]
    versions_ES = EpisodeRows.of(batch).joined(versions_BS, fill=-1)
    newest_E = versions_ES.amax(1)
    oldest_E = versions_ES.masked_fill(versions_ES < 0, torch.iinfo(versions_BS.dtype).max).amin(1)
    shares = {f"async/age_{age}": float((ages == age).float().mean()) for age in range(max_age + 1)}
    return shares | {
        "async/age_mean": float(ages.float().mean()),
        "async/age_max": float(ages.max()),
        "async/mixed_versions": float((oldest_E < newest_E).float().mean()),
    }


def correction_metrics(table: Tensor) -> dict[str, float]:
    """Measure how far the weights that train are from those that sampled, from the `sampler_table` of the trained rows.

    async/ess: effective sample size of the importance weights, as a share of the tokens; NaN where all of them are 0.
    async/behaviour_kl: the k3 estimate (https://joschu.net/blog/kl-approx.html) of the divergence of the weights that
    train from those that drew.
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
    """How the two sides of a run got on since the last step.

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


def pace_metrics(pace: Pace, now: float) -> dict[str, float]:
    """Shares of the time since the last step in which one side waited, and what is under way at the end of this one.

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
