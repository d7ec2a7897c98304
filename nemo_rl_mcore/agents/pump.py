"""From calls that arrive one by one, in an asyncio loop, to batches that the thread which trains has answered."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from nemo_rl_mcore.data import BatchedDataDict

type Generate = Callable[[BatchedDataDict], BatchedDataDict]


@dataclass(frozen=True)
class _Waiting:
    asked: BatchedDataDict
    answer: asyncio.Future[BatchedDataDict]

    def give(self, answered: BatchedDataDict) -> None:
        """Hand the answer over; called from another thread."""
        self.answer.get_loop().call_soon_threadsafe(self._set, answered)

    def _set(self, answered: BatchedDataDict) -> None:
        if not self.answer.done():  # nobody waits for one that was cancelled
            self.answer.set_result(answered)


@dataclass(eq=False)
class Pump:
    """Calls wait in `respond`; the other thread answers all that wait with each `turn`."""

    _queue: queue.SimpleQueue[_Waiting | None] = field(
        default_factory=queue.SimpleQueue[_Waiting | None], init=False
    )

    async def respond(self, asked: BatchedDataDict) -> BatchedDataDict:
        """Wait for the answer to one row."""
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        self._queue.put(waiting)
        return await waiting.answer

    def wake(self) -> None:
        """End the wait of `turn`."""
        self._queue.put(None)

    def turn(self, generate: Generate, timeout_s: float) -> None:
        """Answer all calls that wait, in one batch; wait for the first one so long. Raises what `generate` raises."""
        waiting = [one for one in self._take(timeout_s) if not one.answer.cancelled()]
        if not waiting:
            return
        answered = generate(_joined([one.asked for one in waiting]))
        for row, one in enumerate(waiting):
            one.give(answered.slice(row, row + 1))

    def _take(self, timeout_s: float) -> list[_Waiting]:
        taken: list[_Waiting | None] = []
        get = partial(self._queue.get, timeout=timeout_s)
        try:
            while True:
                taken.append(get())
                get = self._queue.get_nowait
        except queue.Empty:
            return [one for one in taken if one is not None]


def _joined(asked: Sequence[BatchedDataDict]) -> BatchedDataDict:
    strings = "stop_strings"
    if not any(strings in one for one in asked):
        return BatchedDataDict.from_batches(asked)
    none: list[tuple[str, ...]] = [()]
    return BatchedDataDict.from_batches([BatchedDataDict({strings: none, **one}) for one in asked])
