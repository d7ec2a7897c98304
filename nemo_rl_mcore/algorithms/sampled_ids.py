"""What is trained on is what was sampled: token ids against the digests that engines took of what they drew."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nemo_rl_mcore.algorithms.episodes import SAMPLED_DIGESTS, TURN_OF_TOKEN
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.token_digests import digest_of_ids
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
    mask_BS: NDArray[np.bool_] = batch["token_mask"].numpy() != 0
    ids_BS: NDArray[np.int64] = batch["input_ids"].numpy()
    turns_BS: NDArray[np.int64] = batch.get(TURN_OF_TOKEN, batch["token_mask"].long()).numpy()
    sampled_BN: list[list[int]] = batch[SAMPLED_DIGESTS].tolist()
    for episode in batch.samples():
        first, rows = episode.start, slice(episode.start, episode.stop)
        trained = mask_BS[rows]
        wrong = _first_difference(ids_BS[rows][trained], turns_BS[rows][trained], sampled_BN[first])
        if wrong is not None:
            prompt, sample = int(batch["prompt_index"][first]), int(batch["sample_index"][first])
            what = "an observation" if wrong == _OBSERVED else f"answer {wrong}"
            raise RunStoppedError(
                f"prompt_index {prompt}, sample_index {sample}: {what} would be trained on as tokens that the engine "
                "did not sample, by the digest of the ids that it drew; what stands between generation and training "
                "changes input_ids, token_mask or turn_of_token"
            )


def _first_difference(ids_N: NDArray[np.int64], turns_N: NDArray[np.int64], sampled: list[int]) -> int | None:
    """The first turn whose ids are not those that were sampled; `_OBSERVED` for a trained token of no turn."""
    if (turns_N == _OBSERVED).any():
        return _OBSERVED
    last = max(len(sampled), int(turns_N.max(initial=0)))
    for turn in range(1, last + 1):
        ids = ids_N[turns_N == turn]
        found = digest_of_ids(ids) if len(ids) else 0
        if found != (sampled[turn - 1] if turn <= len(sampled) else 0):
            return turn
    return None
