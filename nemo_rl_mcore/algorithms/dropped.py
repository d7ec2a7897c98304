"""Episodes that were dropped, since their environment gave no reply: how many of them a run bears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from nemo_rl_mcore.algorithms.episode_rows import dropped_rows, first_rows
from nemo_rl_mcore.algorithms.episodes import REPLIES
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError

_KEY = "env.pool.max_drop_rate"


def check_drops(step: int, batch: BatchedDataDict, limit: float, reasons: Mapping[str, int]) -> None:
    """Raise RunStoppedError when more than a share `limit` of a step's episodes, in [0, 1], was dropped.

    reasons: how often each one had an answer dropped, since the run began, besides those that stand in the batch; the
    most frequent one is told.
    """
    of_episodes = dropped_rows(batch)[first_rows(batch)]
    dropped, episodes = int(of_episodes.sum()), len(of_episodes)
    if dropped <= limit * episodes:
        return
    reasons = {**_reasons_of(batch), **reasons}
    most = max(reasons, key=lambda reason: reasons[reason], default="")
    raise RunStoppedError(
        f"step {step}: {dropped} of {episodes} episodes ({dropped / episodes:.1%}) were dropped, to which the "
        f"environment gave no reply, or one that cannot be encoded; {_KEY}: {limit:g} is the most"
        + (f"; most often: {most} ({reasons[most]} answers since the run began)" if most else ""),
        code="too-many-dropped",
    )


def _reasons_of(batch: BatchedDataDict) -> Counter[str]:
    replies = (reply for of_row in batch.get(REPLIES, ()) for reply in of_row)
    return Counter(reply["dropped"] for reply in replies if "dropped" in reply)
