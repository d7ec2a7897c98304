"""A session: an agent's model calls for one sample of a prompt, with the sampled tokens.

Runs in the endpoint's asyncio loop. Shapes: P tokens of a prompt, N of an answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.rollouts.transcript import DIGESTS, WEIGHT_VERSIONS

type Respond = Callable[[BatchedDataDict], Awaitable[BatchedDataDict]]
"""Answers one row, as `GenerationInterface.generate` does; cancelling the task abandons the answer."""
type Room = Callable[[int], None]
"""Raises NoRoomError if a prompt of at least this many tokens is too long."""


class SessionError(Exception):
    """A refused call. code: error code for clients, such as `context_length_exceeded`."""

    code, says = "", ""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.says)


class UnknownSessionError(SessionError):
    code, says = "invalid_session", "no session has this token"


class ClosedSessionError(SessionError):
    code, says = "session_closed", "the session is closed"


class NoRoomError(SessionError):
    code = "context_length_exceeded"


class SessionLimitError(SessionError):
    code = "session_limit_exceeded"


@dataclass(frozen=True)
class SessionLimits:
    """context: tokens in prompt plus answer. calls: model calls. reserved: tokens kept for an answer."""

    context: int
    calls: int
    reserved: int = 1


@dataclass(frozen=True, eq=False)
class Call:
    """A sampled answer.

    number: position in the order of answers, from 1. prompt_P, answer_N: int64 ids. logprobs_N: fp32, at the run's
    temperature. versions_N: each token's weight version, int64; None if the engine does not report it. digest: the
    answer's `digest_of_ids`. finished: the answer ended before its length limit. repetition: number of earlier equal
    prompts in the session. heard: the prompt's messages after the answer that it continues, else all of them.
    flaws: see `chat.flaws_of`, once the answer has been read.
    """

    number: int
    prompt_P: NDArray[np.int64]
    answer_N: NDArray[np.int64]
    logprobs_N: NDArray[np.float32]
    versions_N: NDArray[np.int64] | None
    digest: int
    finished: bool
    repetition: int
    heard: tuple[Message, ...] = ()
    flaws: set[str] = field(default_factory=set[str], init=False)

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_P.tolist(), *self.answer_N.tolist()]


@dataclass(eq=False)
class _Asked:
    """A prompt that the client sent, kept for delivery of its answer and for retries."""

    task: asyncio.Task[Call]
    waiting: int = 0
    delivered: bool = False


@dataclass(eq=False)
class Session:
    """The calls of one sample; made by `Sessions.open`.

    prompt, sample: the prompt and sample index to play. respond: function that answers a prompt. token: opaque id, the
    only authorization. rewards: parts of the reward by name. error: engine error that ended the session; its group is
    answered again. refused: last limit that a call exceeded. memory: data kept between calls, see `chat.History`.
    """

    token: str
    prompt: Prompt
    sample: int
    limits: SessionLimits
    respond: Respond
    calls: list[Call] = field(default_factory=list[Call], init=False)
    reward: float | None = field(default=None, init=False)
    rewards: dict[str, float] = field(default_factory=dict[str, float], init=False)
    error: BaseException | None = field(default=None, init=False)
    refused: SessionError | None = field(default=None, init=False)
    closed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    memory: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    _asked: dict[int, list[_Asked]] = field(default_factory=dict[int, list[_Asked]], init=False)

    @property
    def last(self) -> Call | None:
        """The most recently answered call, or None before the first."""
        return max(self.calls, key=lambda call: call.number, default=None)

    async def ask(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        retry: bool = False,
        heard: Sequence[Message] = (),
    ) -> Call:
        """Answer a prompt of P ids.

        A repeated prompt gets the earlier answer if that was not yet `delivered` or if `retry` is set; otherwise it
        gets a new answer. max_tokens: limit for this answer below the run's limit. stop, stop_ids: extra stop texts and
        tokens. Cancelling the task abandons the answer unless another task waits for it.

        Raises ClosedSessionError, NoRoomError, SessionLimitError and any engine error.
        """
        self.require_open()
        self.require_room(len(prompt), "")
        digest = digest_of_ids(prompt)
        earlier = self._asked.get(digest, [])
        if earlier and (retry or not earlier[-1].delivered):
            asked = earlier[-1]
        else:
            if sum(len(several) for several in self._asked.values()) >= self.limits.calls:
                # Clients end the episode if the refusal mentions max_tokens; any other refusal makes them fail.
                what = f"a session may call the model {self.limits.calls} times"
                self.refused = SessionLimitError(f"{what}: max_tokens of a further answer is 0")
                raise self.refused
            drawing = self._draw(prompt, len(earlier), max_tokens, stop, stop_ids, heard)
            earlier.append(asked := _Asked(asyncio.ensure_future(drawing)))
            self._asked[digest] = earlier
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.waiting == 1 and not asked.task.done():
                asked.task.cancel()
                earlier.remove(asked)  # a new request for it uses the same noise
                if not earlier:
                    del self._asked[digest]
            raise
        finally:
            asked.waiting -= 1

    def delivered(self, call: Call) -> None:
        """Mark an answer as written to the socket; an equal prompt then counts as a new request."""
        for asked in self._asked.get(digest_of_ids(call.prompt_P), ()):
            if asked.task.done() and not asked.task.cancelled() and asked.task.result() is call:
                asked.delivered = True

    def require_open(self) -> None:
        if self.closed.is_set():
            raise ClosedSessionError

    def close(self, reward: float | None = None, rewards: dict[str, float] | None = None) -> None:
        """Close the session, with the agent's reward if it gives one, and cancel pending answers."""
        self.require_open()
        self.reward, self.rewards = reward, rewards or {}
        self.closed.set()
        for asked in [one for several in self._asked.values() for one in several]:
            asked.task.cancel()

    def require_room(self, tokens: int, more: str = " or more") -> None:
        """Raise NoRoomError if a prompt of this many tokens leaves no room for an answer."""
        limits = self.limits
        if tokens + limits.reserved > limits.context:
            self.refused = NoRoomError(
                f"This model's maximum context length is {limits.context} tokens. However, your prompt has {tokens} "
                f"tokens{more}, and {limits.reserved} are kept for the answer."
            )
            raise self.refused

    async def _draw(
        self,
        prompt: Sequence[int],
        repetition: int,
        max_tokens: int | None,
        stop: Sequence[str],
        stop_ids: Collection[int],
        heard: Sequence[Message],
    ) -> Call:
        """Sample an answer and truncate it at max_tokens or a stop id; the kept tokens stay unchanged."""
        asked = BatchedDataDict(
            input_ids=torch.tensor([[*prompt]]),
            input_lengths=torch.tensor([len(prompt)]),
            prompt_index=torch.tensor([self.prompt.index]),
            sample_index=torch.tensor([self.sample]),
            turn_index=torch.tensor([noise_of(prompt, repetition)]),
        )
        if stop:
            asked["stop_strings"] = [tuple(stop)]
        try:
            answered = await self.respond(asked)
        except Exception as error:
            self.error = self.error or error
            self.closed.set()
            raise
        drawn = int(answered["lengths"][0])
        answer_N = answered["tokens"][0, :drawn].numpy().astype(np.int64)
        whole = digest_of_ids(answer_N)
        assert DIGESTS not in answered or whole == int(answered[DIGESTS][0]), "ids changed on the way"
        length = drawn if max_tokens is None else min(drawn, max_tokens)
        stops = np.isin(answer_N[:length], [*stop_ids])
        if stops.any():
            length = int(stops.argmax()) + 1
        call = Call(
            len(self.calls) + 1,
            np.array([*prompt], dtype=np.int64),
            answer_N[:length],
            answered["logprobs"][0, :length].numpy().astype(np.float32),
            answered[WEIGHT_VERSIONS][0, :length].numpy() if WEIGHT_VERSIONS in answered else None,
            whole if length == drawn else digest_of_ids(answer_N[:length]),
            bool(stops.any()) or (bool(answered["finished"][0]) and length == drawn),
            repetition,
            tuple(heard),
        )
        self.calls.append(call)
        return call


def noise_of(prompt: Sequence[int], repetition: int) -> int:
    """Return a nonzero int64 noise key, used instead of a turn index and independent of arrival order.

    Seed, step, prompt index, sample index and this value form the full key, see `ops.sampling.sample_keys`.
    """
    return digest_of_ids([repetition, *prompt]) or 1


_REMEMBERED = 10_000


@dataclass(eq=False)
class Sessions:
    """A run's sessions by token; the tokens of recently ended sessions are remembered."""

    _open: dict[str, Session] = field(default_factory=dict[str, Session], init=False)
    _ended: dict[str, None] = field(default_factory=dict[str, None], init=False)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, prompt: Prompt, sample: int, limits: SessionLimits, respond: Respond) -> Session:
        session = Session(f"sk-{secrets.token_urlsafe(24)}", prompt, sample, limits, respond)
        self._open[session.token] = session
        return session

    def get(self, token: str | None) -> Session:
        if token is not None and (session := self._open.get(token)) is not None:
            return session
        if token in self._ended:
            raise ClosedSessionError
        raise UnknownSessionError

    def end(self, session: Session) -> None:
        """Close a session if it is still open and drop its data; idempotent."""
        if not session.closed.is_set():
            session.close()
        if self._open.pop(session.token, None) is not None:
            self._ended[session.token] = None
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
