"""What became of episodes of several turns, and of rewards by name."""

from __future__ import annotations

from nemo_rl_mcore.algorithms.dropped import kept_episodes
from nemo_rl_mcore.algorithms.episodes import REWARDS_PREFIX, TURN_OF_TOKEN
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Ending


def episode_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Turns, how episodes ended, where there may be several turns; the means of rewards that have names.

    Dropped episodes have no rewards.
    """
    kept = kept_episodes(batch)
    metrics = {
        f"{name}_mean": float(column[kept].mean())
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX) and bool(kept.any())
    }
    if TURN_OF_TOKEN not in batch:
        return metrics
    turns, mask = batch[TURN_OF_TOKEN].amax(1), batch["token_mask"]
    behind_prompt = (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)
    observed = (behind_prompt & (mask == 0)).sum(1)
    return metrics | {
        "episodes/turns_mean": float(turns.float().mean()),
        "episodes/turns_max": float(turns.max()),
        "episodes/observation_tokens_mean": float(observed.float().mean()),
        **{
            f"episodes/{ending.name.lower()}_rate": float((batch["ending"] == ending).float().mean())
            for ending in Ending
        },
    }
