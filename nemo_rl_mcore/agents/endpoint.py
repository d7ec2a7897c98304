"""A run's endpoint: a server on the loopback interface, its sessions, and the agents that play them.

`Endpoint` runs in its own thread, with an asyncio loop. The threads that train or call engines start episodes there and
sample the answers, see `AgentCollector`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from nemo_rl_mcore.agents.agents import START_WITHIN_S, AgentEnd, Agents, GymSetup, NemoGym, nemo_gym
from nemo_rl_mcore.agents.app import make_app
from nemo_rl_mcore.agents.chat import tool_parser
from nemo_rl_mcore.agents.requests import EndpointOptions, RunSampling
from nemo_rl_mcore.agents.server import served
from nemo_rl_mcore.agents.session import (
    Call,
    NoRoomError,
    Respond,
    Session,
    SessionLimitError,
    SessionLimits,
    Sessions,
)
from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.environment import RETRIES
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.activity import LoopThread
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS, Piece, Transcript, batch_of
from nemo_rl_mcore.environment.turns import Ending, Reply, Turn, conversation


def in_order(calls: Sequence[Call]) -> list[Call]:
    """Return calls in an order independent of time; a call that continues another has the longer prompt."""
    return sorted(calls, key=lambda call: (len(call.prompt_P), digest_of_ids(call.prompt_P), call.repetition))


def chains_of(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of each training row, in order.

    A call continues a row if its prompt begins with all of the row's tokens, sampled ones included; else it begins a
    row, with its whole prompt as context. So each sampled token is in one row, after the tokens from which it was
    sampled, whatever a harness edits, compacts, retries or requests in parallel.
    """
    chains: list[list[Call]] = []
    for call in calls:
        longest, fitting = -1, list[Call]()
        for chain in chains:
            prompt_P, answer_N = chain[-1].prompt_P, chain[-1].answer_N
            shown, length = len(prompt_P), len(prompt_P) + len(answer_N)
            if (
                longest < length <= len(call.prompt_P)
                and np.array_equal(call.prompt_P[:shown], prompt_P)
                and np.array_equal(call.prompt_P[shown:length], answer_N)
            ):
                longest, fitting = length, chain
        if longest < 0:
            chains.append(fitting)
        fitting.append(call)
    return chains


def last_turn(session: Session, tokenizer: Tokenizer) -> Turn:
    """Return the conversation that ends with the session's last answer, for scoring."""
    calls, last = in_order(session.calls), session.last
    assert last is not None
    [chain] = [chain for chain in chains_of(calls) if last in chain]
    messages: list[Message] = []
    for call in chain[: chain.index(last) + 1]:
        messages += [*call.heard, Message("assistant", tokenizer.decode(call.answer_N.tolist()))]
    return Turn(session.prompt, tuple(messages), last.finished)


def transcript_of(session: Session, reply: Reply, ending: Ending, shown: Sequence[int]) -> Transcript:
    """Return a session's record. shown: the prompt's ids, for a session without calls. reply: to the last call."""
    calls = in_order(session.calls)
    turns = {call: turn for turn, call in enumerate(calls, start=1)}
    rows: list[list[Piece]] = []
    for chain in chains_of(calls):
        pieces, length = list[Piece](), 0
        for call in chain:
            versions = -1 if call.versions_N is None else call.versions_N
            pieces.append(Piece(call.prompt_P[length:]))
            pieces.append(Piece(call.answer_N, turns[call], call.logprobs_N, versions))
            length = len(call.prompt_P) + len(call.answer_N)
        rows.append(pieces)
    episode = Transcript(
        session.prompt.index,
        session.sample,
        rows or [[Piece(np.array([*shown], dtype=np.int64))]],
        digests=[call.digest if len(call.answer_N) else 0 for call in calls],
        finished=session.last is not None and session.last.finished,
        ending=ending,
    )
    for call, following in pairwise(calls):
        flaws = tuple(sorted(call.flaws))
        episode.take(Reply(0.0, terminated=False, observation=following.heard, flaws=flaws))
    episode.take(replace(reply, flaws=tuple(sorted(calls[-1].flaws))) if calls else reply)
    return episode


MODEL = "policy"
"""The model's name for clients. Others are refused: calls meant for a judge must not be trained on."""
_START_WITHIN_S, _END_WITHIN_S = 30.0, 60.0

type Judge = Callable[[Sequence[Turn]], Awaitable[Sequence[Reply]]]
"""As `driver.rollouts.player.Environments.replies_soon`."""


class Endpoint:
    """A context manager: the server listens inside the block, and all agents have ended after it.

    stop_ids: end an answer. variables: the agents' environment. Raises RunStoppedError for a port in use.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, stop_ids: Sequence[int], variables: Mapping[str, str]
    ) -> None:
        section = config.env.endpoint
        assert section is not None
        policy = config.policy
        self._section = section
        self._limits = SessionLimits(
            policy.max_total_sequence_length, config.max_rollout_turns, policy.reserved_tokens
        )
        self._sessions = Sessions()
        self._tokenizer, self._newest = tokenizer, 0
        generation, context = policy.generation, self._limits.context
        self._options = EndpointOptions(
            model=MODEL,
            context=context,
            tokenizer=tokenizer,
            sampling=RunSampling(
                generation.temperature,
                generation.top_p,
                generation.top_k,
                context if generation.fit_to_sequence else generation.max_new_tokens,
                generation.stop_strings or (),
                frozenset(stop_ids),
            ),
            tool_parser=tool_parser(section.tool_parser, tokenizer),
            version=lambda: self._newest,
            failed=self._tell_error,
        )
        self._app = make_app(self._sessions, self._options)
        self._variables, self._gym = variables, config.env.nemo_gym
        self._log_dir = Path(config.logger.log_dir)
        self._agents: Agents | NemoGym = Agents(
            section.command, variables, section.processes, section.timeout_s
        )
        self.thread = LoopThread("endpoint", self._tell_error)
        self._server = AsyncExitStack()
        self._opening: asyncio.Task[Any] | None = None
        self._reported = set[str]()
        self._playing = set[asyncio.Task[Transcript]]()
        self.url = ""  # of the server, without a path

    def __enter__(self) -> Self:
        """Start the server, and NeMo Gym if the recipe has it."""
        of_gym = 0.0 if self._gym is None else START_WITHIN_S
        starting = self.thread.call(self._open())
        try:
            starting.result(_START_WITHIN_S + of_gym)
        except BaseException:
            starting.cancel()
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.call(self._end()).result(_END_WITHIN_S)
        self.thread.close()

    # In the endpoint's thread

    async def _open(self) -> None:
        self._opening = asyncio.current_task()
        address = await self._server.enter_async_context(served(self._app))
        self.url = address.url
        if self._gym is not None:
            setup = GymSetup(
                self._section.command[0] if self._section.command else "python",
                self._section.processes == 1,
                self._gym,
                self._options.sampling,
                self._variables,
                MODEL,
                self._section.timeout_s,
                self._log_dir,
            )
            self._agents = await self._server.enter_async_context(nemo_gym(setup, self.url))

    async def _end(self) -> None:
        playing = [*self._playing]
        for episode in playing:
            episode.cancel()
        # A cancelled opening ends whatever it has started.
        opening = () if self._opening is None else (self._opening,)
        await asyncio.gather(*playing, *opening, return_exceptions=True)
        await self._server.aclose()

    async def play(self, episodes: Sequence[Coroutine[Any, Any, Transcript]]) -> list[Transcript]:
        """Play episodes concurrently; the first error cancels the others and is raised."""
        playing = [asyncio.ensure_future(episode) for episode in episodes]
        self._playing.update(playing)
        try:
            return await asyncio.gather(*playing)
        finally:
            for one in playing:
                one.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            self._playing.difference_update(playing)

    async def episode(
        self, prompt: Prompt, sample: int, respond: Respond, judge: Judge | None, shown: Sequence[int]
    ) -> Transcript:
        """Let agents play a sample, one after the other, until one succeeds or all tries are used.

        judge: scores the last answer if the agent gives no reward; without one the episode is then dropped. shown: the
        prompt's ids. Raises the engine's errors.
        """

        async def noted(asked: BatchedDataDict) -> BatchedDataDict:
            answered = await respond(asked)
            if WEIGHT_VERSIONS in answered:
                self._newest = max(self._newest, int(answered[WEIGHT_VERSIONS].max()))
            return answered

        messages = [{"role": message.role, "content": message.content} for message in conversation(prompt)]
        for last in (*[False] * RETRIES, True):
            session = self._sessions.open(prompt, sample, self._limits, noted)
            task = {
                "messages": messages,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "index": prompt.index,
                "sample": sample,
                "source": prompt.source,
                "columns": dict(prompt.columns),
            }
            try:
                ended = await self._agents.run(session, self.url, task)
            finally:
                self._sessions.end(session)
            if session.error is not None:
                raise session.error
            reply = await self._reply(session, ended, judge)
            if reply.dropped is not None and reply.dropped not in self._reported:
                self._reported.add(reply.dropped)  # each reason is printed once, with an agent's last output
                said = [f"env.endpoint: {reply.dropped}", ended.said]
                write_line(sys.stderr, "\n".join(filter(None, said)))
            if reply.dropped is None or last or ended.for_good:
                return transcript_of(session, reply, _ending(session, reply), shown)
        raise AssertionError("the last try returns")

    async def _reply(self, session: Session, ended: AgentEnd, judge: Judge | None) -> Reply:
        if session.reward is not None and session.calls:
            return Reply(session.reward, rewards=session.rewards)
        if ended.why and session.refused is None:
            return Reply(0.0, dropped=f"the agent {ended.why}")
        if not session.calls:
            return Reply(0.0, dropped="the agent called no model")
        if judge is not None:
            [reply] = await judge([last_turn(session, self._tokenizer)])
            return reply
        if session.refused is not None:
            return Reply(0.0)
        return Reply(0.0, dropped="the agent ended without a reward, and the recipe has no environment")

    def _tell_error(self, error: BaseException) -> None:
        write_line(sys.stderr, f"endpoint: {type(error).__name__}: {error}")


def _ending(session: Session, reply: Reply) -> Ending:
    if reply.dropped is not None:
        return Ending.DROPPED
    if reply.unscored:
        return Ending.UNSCORED
    match session.refused:
        case NoRoomError():
            return Ending.NO_ROOM
        case SessionLimitError():
            return Ending.TURN_LIMIT
        case _:
            ended = session.last is not None and session.last.finished
            return Ending.TERMINATED if ended else Ending.ANSWER_LIMIT


# Python handles signals between two waits.
_WAKE_EVERY_S = 0.2


@dataclass(frozen=True)
class AgentCollector(RolloutCollector):
    """Lets agents play each sample of a prompt."""

    endpoint: Endpoint = field(kw_only=True)
    judges: bool = field(kw_only=True)
    """The environment scores the last answer if an agent gives no reward."""

    def play_now(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, *, step: int, greedy: bool = False
    ) -> BatchedDataDict:
        """As `RolloutCollector.play_now`; this thread answers all calls that wait as one batch."""
        waiting = queue.SimpleQueue[tuple[BatchedDataDict, asyncio.Future[BatchedDataDict]] | None]()

        async def respond(row: BatchedDataDict) -> BatchedDataDict:
            answer: asyncio.Future[BatchedDataDict] = asyncio.get_running_loop().create_future()
            waiting.put((row, answer))
            return await answer

        def give(answer: asyncio.Future[BatchedDataDict], row: BatchedDataDict) -> None:
            if not answer.done():  # a cancelled one has no reader
                answer.set_result(row)

        playing = self.endpoint.thread.call(self._episodes(prompts, asked, respond))
        playing.add_done_callback(lambda _: waiting.put(None))  # ends the wait below
        try:
            with activity.at(f"waiting for the agents of {asked.size} sessions", timed=False):
                while not playing.done():
                    taken = list[tuple[BatchedDataDict, asyncio.Future[BatchedDataDict]] | None]()
                    with suppress(queue.Empty):
                        taken.append(waiting.get(timeout=_WAKE_EVERY_S))
                        while True:
                            taken.append(waiting.get_nowait())
                    calls = [one for one in taken if one is not None and not one[1].cancelled()]
                    if not calls:
                        continue
                    rows, strings = [row for row, _ in calls], "stop_strings"
                    if any(strings in row for row in rows):
                        none: list[tuple[str, ...]] = [()]
                        rows = [BatchedDataDict({strings: none, **row}) for row in rows]
                    batch = BatchedDataDict.from_batches(rows)
                    answered = self.generation.generate(batch, step=step, greedy=greedy)
                    for place, (_, answer) in enumerate(calls):
                        row = answered.slice(place, place + 1)
                        answer.get_loop().call_soon_threadsafe(give, answer, row)
            return playing.result()
        finally:
            playing.cancel()

    def is_answer_to(self, asked: BatchedDataDict, batch: BatchedDataDict) -> bool:
        """Compare prompts by index: an agent shows the model the prompt in its own way."""
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
        """As `RolloutCollector.play`; `respond` runs in the caller's loop."""
        loop = asyncio.get_running_loop()

        async def call(row: BatchedDataDict) -> BatchedDataDict:
            return await respond(row)

        async def crossing(row: BatchedDataDict) -> BatchedDataDict:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(row), loop))

        playing: Future[BatchedDataDict] = self.endpoint.thread.call(self._episodes(prompts, asked, crossing))
        return await asyncio.wrap_future(playing)

    async def _episodes(
        self, prompts: Sequence[Prompt], asked: BatchedDataDict, respond: Respond
    ) -> BatchedDataDict:
        """Play all samples at once; an engine's failure cancels the other samples."""
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
            episodes, pad_token_id=self.tokenizer.pad_token_id, turns=self.form.turns, digests=True
        )
