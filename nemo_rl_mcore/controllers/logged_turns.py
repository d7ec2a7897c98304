"""The turns of a group between its data and the log."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_mcore.algorithms.episodes import REPLIES, sampled_versions
from nemo_rl_mcore.controllers.events import LoggedTurn
from nemo_rl_mcore.controllers.group_store import segments_of
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.turns import Reply, Turn


def turns_of(batch: BatchedDataDict) -> tuple[LoggedTurn, ...]:
    """The turns of a group's rows."""
    replies = batch[REPLIES]
    return tuple(
        LoggedTurn(
            tuple(segments_of(sampled_versions(batch, turn))),
            tuple(of_row[turn] for of_row in replies if turn < len(of_row)),
        )
        for turn in range(max(map(len, replies), default=0))
    )


class LoggedReplies:
    """Implements `interfaces.Replies` for one group, once: it says what the log has."""

    def __init__(self, turns: Sequence[LoggedTurn]) -> None:
        self._turns = iter(turns)

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Replies.replies_soon`."""
        return [Reply.from_json(recorded) for recorded in next(self._turns).replies]
