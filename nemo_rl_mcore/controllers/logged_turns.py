"""The turns of a group between its data and the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from nemo_rl_mcore.algorithms.episodes import REPLIES, TURN_OF_TOKEN, sampled_versions
from nemo_rl_mcore.controllers.events import LoggedTurn
from nemo_rl_mcore.controllers.group_store import segments_of
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.errors import RunStoppedError


def turns_of(batch: BatchedDataDict) -> tuple[LoggedTurn, ...]:
    """The turns of a group's rows."""
    replies = batch[REPLIES]
    return tuple(
        LoggedTurn(
            tuple(segments_of(_versions_by_step(batch, turn).unsqueeze(0))),
            tuple(of_row[turn] for of_row in replies if turn < len(of_row)),
        )
        for turn in range(max(map(len, replies), default=0))
    )


def _versions_by_step(batch: BatchedDataDict, turn: int) -> torch.Tensor:
    """The version of each decode step of an embedded engine, int64 [steps].

    Rows with equally many tokens at hand are drawn together, and one such batch after the other, the shortest first.
    """
    numbers = batch.get(TURN_OF_TOKEN, batch["token_mask"])
    drawn_BS = numbers == turn + 1
    at_hand_B = torch.where(drawn_BS.any(1), drawn_BS.long().argmax(1), -1)
    lengths = cast("list[int]", at_hand_B.tolist())  # pyright: ignore[reportUnknownMemberType]
    of_batches = [
        sampled_versions(batch.select_indices((at_hand_B == length).nonzero().flatten()), turn)
        for length in sorted({*lengths} - {-1})
    ]
    newest = torch.iinfo(torch.long).max
    return torch.cat([versions.masked_fill(versions < 0, newest).amin(0) for versions in of_batches])


class LoggedReplies:
    """Implements `interfaces.Replies` for one group, once: it says what the log has."""

    def __init__(self, turns: Sequence[LoggedTurn]) -> None:
        self._turns = iter(turns)

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Replies.replies_soon`; RunStoppedError for turns that the log does not have."""
        logged = next(self._turns, None)
        if logged is None or len(logged.replies) != len(turns):
            rows = 0 if logged is None else len(logged.replies)
            raise RunStoppedError(
                f"prompt {turns[0].prompt.index}: {len(turns)} answers of a turn, and {rows} in the log: they are not "
                "those of the log"
            )
        return [Reply.from_json(recorded) for recorded in logged.replies]
