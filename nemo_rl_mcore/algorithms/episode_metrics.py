"""What became of episodes of several turns, and of rewards by name."""

from __future__ import annotations

from nemo_rl_mcore.algorithms.episode_rows import ENDING, EpisodeRows, first_rows
from nemo_rl_mcore.algorithms.episodes import REPLIES, REWARDS_PREFIX, TURN_OF_TOKEN
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Ending


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Turns, how episodes ended, where there may be several turns; the means of rewards that have names.

    Dropped episodes count in how they ended alone, and one of several rows counts once.
    """
    episodes = EpisodeRows.of(batch)
    metrics = _ending_rates(batch) if TURN_OF_TOKEN in batch else {}
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
    replies = batch.get(REPLIES, ())
    of_episodes = [replies[row] for row in first_rows(batch)] if replies else []
    return float(sum("cut" in reply for of_row in of_episodes for reply in of_row))


def _ending_rates(batch: BatchedDataDict) -> dict[str, float]:
    endings = batch[ENDING][first_rows(batch)]
    return {
        f"episodes/{ending.name.lower()}_rate": float((endings == ending).float().mean()) for ending in Ending
    }
