"""Measure what became of episodes of several turns, of rewards by name, and of episodes without a reply.

Of these, which are dropped, a run bears a limited number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Ending
from nemo_rl_mcore.driver.rollouts.episode_rows import ENDING, EpisodeRows, dropped_rows, first_rows
from nemo_rl_mcore.driver.rollouts.transcript import REPLIES, REWARDS_PREFIX, TURN_OF_TOKEN
from nemo_rl_mcore.errors import RunStoppedError


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Return turns and how episodes ended, where there may be several turns; the means of rewards that have names.

    Episodes that are dropped or not scored count in how they ended alone, and one of several rows counts once. The
    share of those not scored is there where there are any.
    """
    episodes, rates = EpisodeRows.of(batch), _ending_rates(batch)
    metrics = (
        rates if TURN_OF_TOKEN in batch else {_UNSCORED: rates[_UNSCORED]} if rates.get(_UNSCORED) else {}
    )
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
        "episodes/observations_cut": _observations_cut(batch),
    }


def _observations_cut(batch: BatchedDataDict) -> float:
    return float(sum("cut" in reply for of_episode in _replies(batch) for reply in of_episode))


def _replies(batch: BatchedDataDict) -> list[list[dict[str, Any]]]:
    """Return what was said to each episode, once."""
    return [batch[REPLIES][row] for row in first_rows(batch)] if REPLIES in batch else []


_UNSCORED = "episodes/unscored_rate"


def _ending_rates(batch: BatchedDataDict) -> dict[str, float]:
    if ENDING not in batch:
        return {}
    endings = batch[ENDING][first_rows(batch)]
    return {
        f"episodes/{ending.name.lower()}_rate": float((endings == ending).float().mean()) for ending in Ending
    }


_KEY = "env.pool.max_drop_rate"


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
    reasons = {**sum(map(_reasons_of, batches), Counter[str]()), **reasons}
    most = max(reasons, key=lambda reason: reasons[reason], default="")
    raise RunStoppedError(
        f"step {step}: {dropped} of {episodes} episodes ({dropped / episodes:.1%}) were dropped, to which the "
        f"environment gave no reply, or one that cannot be encoded; {_KEY}: {limit:g} is the most"
        + (f"; most often: {most} ({reasons[most]} answers since the run began)" if most else ""),
        code="too-many-dropped",
    )


def _reasons_of(batch: BatchedDataDict) -> Counter[str]:
    replies = (reply for of_episode in _replies(batch) for reply in of_episode)
    return Counter(reply["dropped"] for reply in replies if "dropped" in reply)
