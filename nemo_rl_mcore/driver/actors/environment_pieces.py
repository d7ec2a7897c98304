"""Turns that wait for an environment actor, a few at a time: a queue of pieces in one asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_mcore.data.turns import Reply, Turn


@dataclass(frozen=True, eq=False)
class Piece:
    """Turns that one call of an environment shows it. avoided: the actor that has failed with them, if one has."""

    turns: Sequence[Turn]
    avoided: int | None
    replies: asyncio.Future[list[Reply]]

    def give(self, replies: list[Reply]) -> None:
        """Answer whoever asked, unless nobody waits any more."""
        if not self.replies.done():
            self.replies.set_result(replies)

    def fail(self, error: BaseException) -> None:
        """Raise an error where the piece was asked for, unless nobody waits any more."""
        if not self.replies.done():
            self.replies.set_exception(error)


class Pieces:
    """First in, first out, but for pieces that are tried again: they come first, and go to another actor.

    actors: how many take pieces; a single one takes all.
    """

    def __init__(self, actors: int) -> None:
        self._actors = actors
        self._waiting: deque[Piece] = deque()
        self._open: set[Piece] = set()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def replies(self, turns: Sequence[Turn], avoided: int | None) -> list[Reply]:
        """Return what an actor gives for turns, or raise what it has failed with; see `fail`."""
        if self._failure is not None:
            raise self._failure
        piece = Piece(turns, avoided, asyncio.get_running_loop().create_future())
        self._open.add(piece)
        (self._waiting.append if avoided is None else self._waiting.appendleft)(piece)
        try:
            async with self._changed:
                self._changed.notify_all()
            return await piece.replies
        finally:
            self._open.discard(piece)
            if piece in self._waiting:  # nobody waits for it any more
                self._waiting.remove(piece)

    async def next(self, actor: int) -> Piece:
        """Return the piece that this actor is to answer next, as soon as there is one."""
        async with self._changed:
            while (piece := self._for(actor)) is None:
                await self._changed.wait()
            self._waiting.remove(piece)
            return piece

    def fail(self, error: BaseException) -> None:
        """Raise this wherever a piece is, or will be, asked for; called in the loop."""
        self._failure = self._failure or error
        for piece in self._open:
            piece.fail(error)

    def _for(self, actor: int) -> Piece | None:
        return next((piece for piece in self._waiting if self._actors == 1 or piece.avoided != actor), None)
