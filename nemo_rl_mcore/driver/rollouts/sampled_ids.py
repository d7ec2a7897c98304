"""Check that what is trained on was sampled: token ids against the digests that engines took of what they sampled.

Shapes: E episodes of R rows in all, S columns, N turns from 1 on; turn 0 is of observations, which nobody sampled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.token_digests import digest_of_ids
from nemo_rl_mcore.driver.rollouts.transcript import SAMPLED_DIGESTS, TURN_OF_TOKEN
from nemo_rl_mcore.errors import RunStoppedError

_OBSERVED = 0


def require_sampled_ids(batch: BatchedDataDict) -> None:
    """Compare the ids under token_mask, turn by turn, with sampled_digests int64 [B, turns], 0 where there was no turn.

    batch: see `Rollout`; without turn_of_token there is one turn, and without sampled_digests, of an engine that gives
    none, nothing is compared. An episode of several rows is compared as one. Raises RunStoppedError, naming the answer,
    for the first one that differs.
    """
    if SAMPLED_DIGESTS not in batch:
        return
    episodes = batch.samples()
    sampled_EN: NDArray[np.int64] = batch[SAMPLED_DIGESTS].numpy()[[rows.start for rows in episodes]]
    found_EN = _digests_of_turns(batch, episodes)
    turns = max(sampled_EN.shape[1] + 1, found_EN.shape[1])
    expected_EN = _widened(np.pad(sampled_EN, ((0, 0), (1, 0))), turns)
    wrong = np.argwhere(_widened(found_EN, turns) != expected_EN)
    if not len(wrong):
        return
    episode, turn = map(int, wrong[0])
    first = episodes[episode].start
    prompt, sample = int(batch["prompt_index"][first]), int(batch["sample_index"][first])
    what = "an observation" if turn == _OBSERVED else f"answer {turn}"
    raise RunStoppedError(
        f"prompt_index {prompt}, sample_index {sample}: {what} would be trained on as tokens that the engine "
        "did not sample, by the digest of the ids that it sampled; what stands between generation and training "
        "changes input_ids, token_mask or turn_of_token",
        code="ids-differ",
    )


def _digests_of_turns(batch: BatchedDataDict, episodes: list[range]) -> NDArray[np.int64]:
    """Of the trained ids of each turn [E, 1 + N]; 0 where there are none."""
    mask_BS: NDArray[np.bool_] = batch["token_mask"].numpy() != 0
    turns_BS: NDArray[np.int64] = batch.get(TURN_OF_TOKEN, batch["token_mask"].long()).numpy()
    episode_of_row = np.repeat(np.arange(len(episodes)), [len(rows) for rows in episodes])
    # All trained tokens, one after the other: those of a turn together, in their order.
    turn_T, id_T = turns_BS[mask_BS], np.ascontiguousarray(batch["input_ids"].numpy()[mask_BS])
    turns = 1 + int(turn_T.max(initial=0))
    group_T = episode_of_row[mask_BS.nonzero()[0]] * turns + turn_T
    order = group_T.argsort(kind="stable")
    group_T = group_T[order]
    starts = np.flatnonzero(np.diff(group_T, prepend=-1))
    parts = np.split(id_T[order], starts[1:])
    found = np.zeros(len(episodes) * turns, dtype=np.int64)
    found[group_T[starts]] = [digest_of_ids(ids) for ids in parts[: len(starts)]]
    return found.reshape(len(episodes), turns)


def _widened(values_EN: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    """With columns of 0 after, up to as many."""
    return np.pad(values_EN, ((0, 0), (0, columns - values_EN.shape[1])))
