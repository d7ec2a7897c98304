"""Measure how the rollouts of a step came to be.

What became of episodes of several turns, of rewards by name, and of episodes without a reply, of which a run bears a
limited number; how old tokens are, and which side waited for the other, as only asynchronous steps report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Ending
from nemo_rl_mcore.driver.rollouts.episode_rows import ENDING, EpisodeRows, dropped_rows, first_rows
from nemo_rl_mcore.driver.rollouts.transcript import REPLIES, REWARDS_PREFIX, TURN_OF_TOKEN, WEIGHT_VERSIONS
from nemo_rl_mcore.errors import RunStoppedError


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Return turns and how episodes ended, where there may be several turns; the means of rewards that have names.

    Episodes that are dropped or not scored count in how they ended alone, and one of several rows counts once. The
    share of those not scored is there where there are any.
    """
    episodes, metrics = EpisodeRows.of(batch), dict[str, float]()
    if ENDING in batch:
        endings = batch[ENDING][first_rows(batch)]
        for ending in Ending:
            rate = float((endings == ending).float().mean())
            if TURN_OF_TOKEN in batch or (ending is Ending.UNSCORED and rate):
                metrics[f"episodes/{ending.name.lower()}_rate"] = rate
    if not len(episodes.first):
        return metrics
    metrics |= {
        f"{name}_mean": float(episodes.one_each(column).mean())
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX)
    }
    if TURN_OF_TOKEN not in batch:
        return metrics
    turns, mask = episodes.joined(batch[TURN_OF_TOKEN]).amax(1), batch["token_mask"]
    behind_prompt = (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)
    observed = episodes.total((behind_prompt & (mask == 0)).sum(1))
    return metrics | {
        "episodes/turns_mean": float(turns.float().mean()),
        "episodes/turns_max": float(turns.max()),
        "episodes/observation_tokens_mean": float(observed.float().mean()),
        "episodes/observations_cut": float(sum("cut" in reply for reply in _replies(batch))),
    }


def check_drops(
    step: int, batches: Sequence[BatchedDataDict], limit: float, reasons: Mapping[str, int]
) -> None:
    """Raise RunStoppedError when more than a share `limit` of a step's episodes, in [0, 1], was dropped.

    batches: all of the step. reasons: how often each one had an answer dropped, since the run began, besides those that
    stand in the batches; the most frequent one is named.
    """
    of_batches = [dropped_rows(batch)[first_rows(batch)] for batch in batches]
    dropped, episodes = sum(int(of_one.sum()) for of_one in of_batches), sum(map(len, of_batches))
    if dropped <= limit * episodes:
        return
    replies = (reply for batch in batches for reply in _replies(batch))
    reasons = {**Counter(reply["dropped"] for reply in replies if "dropped" in reply), **reasons}
    most = max(reasons, key=lambda reason: reasons[reason], default="")
    raise RunStoppedError(
        f"step {step}: {dropped} of {episodes} episodes ({dropped / episodes:.1%}) were dropped, to which the "
        f"environment gave no reply, or one that cannot be encoded; env.pool.max_drop_rate: {limit:g} is the most"
        + (f"; most often: {most} ({reasons[most]} answers since the run began)" if most else ""),
        code="too-many-dropped",
    )


def _replies(batch: BatchedDataDict) -> Iterator[dict[str, Any]]:
    """Yield what was said to each episode, once."""
    for row in first_rows(batch) if REPLIES in batch else ():
        yield from batch[REPLIES][row]


def age_metrics(batches: Sequence[BatchedDataDict], version: int, max_age: int) -> dict[str, float]:
    """Count the training steps by which the weights that sampled each token are behind `version`.

    batches: the chunks of a step; the versions of their tokens are weight_versions [B, S].

    async/age_<k> are shares of the tokens; async/mixed_versions is that of responses sampled by several versions.
    """
    drawn = [batch[WEIGHT_VERSIONS] for batch in batches]
    ages = torch.cat([(version - versions_BS)[versions_BS >= 0] for versions_BS in drawn])
    mixed: list[Tensor] = []
    for batch in batches:  # bool [E], the responses that weights of several versions sampled
        versions_ES = EpisodeRows.of(batch).joined(batch[WEIGHT_VERSIONS], fill=-1)
        newest = torch.iinfo(versions_ES.dtype).max
        mixed.append(versions_ES.masked_fill(versions_ES < 0, newest).amin(1) < versions_ES.amax(1))
    shares = {f"async/age_{age}": float((ages == age).float().mean()) for age in range(max_age + 1)}
    return shares | {
        "async/age_mean": float(ages.float().mean()),
        "async/age_max": float(ages.max()),
        "async/mixed_versions": float(torch.cat(mixed).float().mean()),
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
