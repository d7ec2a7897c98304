"""Episodes that agents play: a session and a process for each sample, in place of turns with an environment."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from nemo_rl_mcore.agents.endpoint import Endpoint
from nemo_rl_mcore.agents.session import Respond
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.transcript import batch_of
from nemo_rl_mcore.rank import activity

type Generate = Callable[[BatchedDataDict], BatchedDataDict]


@dataclass(frozen=True)
class _WaitingCall:
    asked: BatchedDataDict
    answer: asyncio.Future[BatchedDataDict]

    def give(self, answered: BatchedDataDict) -> None:
        """Hand the answer over; called from another thread."""

        def set_result() -> None:
            if not self.answer.done():  # nobody waits for one that was cancelled
                self.answer.set_result(answered)

        self.answer.get_loop().call_soon_threadsafe(set_result)


@dataclass(eq=False)
class Pump:
    """Calls wait in `respond`; the other thread answers all that wait with each `turn`."""

    _queue: queue.SimpleQueue[_WaitingCall | None] = field(
        default_factory=queue.SimpleQueue[_WaitingCall | None], init=False
    )

    async def respond(self, asked: BatchedDataDict) -> BatchedDataDict:
        """Wait for the answer to one row."""
        waiting = _WaitingCall(asked, asyncio.get_running_loop().create_future())
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
        asked, strings = [one.asked for one in waiting], "stop_strings"
        if any(strings in one for one in asked):
            none: list[tuple[str, ...]] = [()]
            asked = [BatchedDataDict({strings: none, **one}) for one in asked]
        answered = generate(BatchedDataDict.from_batches(asked))
        for row, one in enumerate(waiting):
            one.give(answered.slice(row, row + 1))

    def _take(self, timeout_s: float) -> list[_WaitingCall]:
        taken: list[_WaitingCall | None] = []
        get = partial(self._queue.get, timeout=timeout_s)
        try:
            while True:
                taken.append(get())
                get = self._queue.get_nowait
        except queue.Empty:
            return [one for one in taken if one is not None]


# Python hears of signals between two waits.
_WAKE_EVERY_S = 0.2


@dataclass(frozen=True)
class AgentCollector(RolloutCollector):
    """Has agents play each sample of a prompt; see `agents.endpoint.Endpoint`."""

    endpoint: Endpoint = field(kw_only=True)
    judges: bool = field(kw_only=True)
    """Whether the environment scores the last answer where an agent gives no reward."""

    def play_now(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, *, step: int, greedy: bool = False
    ) -> BatchedDataDict:
        """See `RolloutCollector.play_now`; calls that wait at the same time are answered in one batch."""
        pump = Pump()
        playing = self.endpoint.begin(self._episodes(prompts, asked, pump.respond))
        playing.add_done_callback(lambda _: pump.wake())
        generate = partial(self.generation.generate, step=step, greedy=greedy)
        try:
            with activity.at(f"waiting for the agents of {asked.size} sessions", timed=False):
                while not playing.done():
                    pump.turn(generate, _WAKE_EVERY_S)
            return playing.result()
        finally:
            playing.cancel()

    def is_answer_to(self, asked: BatchedDataDict, batch: BatchedDataDict) -> bool:
        """See `RolloutCollector.is_answer_to`: an agent shows the prompt to the model in its own way."""
        first = [rows.start for rows in batch.samples()]
        return torch.equal(batch["prompt_index"][first], asked["prompt_index"])

    async def play(
        self,
        prompts: Sequence[Prompt],
        asked: BatchedDataDict,
        respond: Callable[[BatchedDataDict], Awaitable[BatchedDataDict]],
        replies: Callable[[Sequence[Turn]], Awaitable[Sequence[Reply]]] | None = None,
        *,
        apart: Callable[..., Awaitable[object]] = asyncio.to_thread,
    ) -> BatchedDataDict:
        """See `RolloutCollector.play`; `respond` is called in the loop of the caller."""
        loop = asyncio.get_running_loop()

        async def crossing(row: BatchedDataDict) -> BatchedDataDict:
            async def call() -> BatchedDataDict:
                return await respond(row)

            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))

        playing: Future[BatchedDataDict] = self.endpoint.begin(self._episodes(prompts, asked, crossing))
        return await asyncio.wrap_future(playing)

    async def _episodes(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, respond: Respond
    ) -> BatchedDataDict:
        """Play all samples at once; where an engine fails, the other samples are given up."""
        samples = asked.size // len(prompts)
        of_rows = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        shown = zip(asked["input_ids"].tolist(), asked["input_lengths"].tolist(), strict=True)
        judge = self.environments.replies_soon if self.judges else None
        episodes = await self.endpoint.play(
            [
                self.endpoint.episode(prompt, sample, respond, judge, ids[:length])
                for (prompt, sample), (ids, length) in zip(of_rows, shown, strict=True)
            ]
        )
        return batch_of(
            episodes,
            pad_token_id=self.tokenizer.pad_token_id,
            turns=self.form.turns,
            versions=any(one.has_versions for one in episodes),
            digests=True,
        )
