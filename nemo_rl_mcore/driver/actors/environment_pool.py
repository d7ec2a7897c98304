"""The environments of a run in Ray actors: whatever becomes of one of these costs its turns at most, and no numbers.

Runs in the driver, in three kinds of threads: callers wait in theirs; one thread, "environments", has the asyncio loop
that gives pieces to actors and takes their replies; each start of an actor has a thread of `pool.Pool`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import batched, chain
from typing import Any

import ray

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import RAISED, handed_objects
from nemo_rl_mcore.config.environment import PROCESS_START_S
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, GivenUpError, settled
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerCall, stderr_tail
from nemo_rl_mcore.driver.actors.places import RankSlot, given_variables, rank_environment
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.actors.supervised import Construction, actor_class
from nemo_rl_mcore.driver.loop_thread import LoopThread
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.environment.registry import EnvironmentProcess
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError
from nemo_rl_mcore.rank import activity

_LONGEST_PIECE = 8
_PIECES_AN_ACTOR = 4
"""Of a call, at least: so that a slow one does not keep the others waiting."""
# Python hears of signals between two waits.
_WAKE_EVERY_S = 0.2
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
_MOST_REASONS = 20
_DROPPED, _RETRIED, _RESTARTS = "env/dropped", "env/retried", "env/restarts"


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """Implements `Environments` over `env.pool.size` actors, each with the environment of the recipe.

    The turns of a call are split into pieces, which any actor answers; which one does, and when, changes no reply. A
    piece whose actor raises, dies or passes `env.pool.timeout_s` is tried again turn by turn, and a turn without a
    reply after `env.pool.retries` is dropped. An actor that died or hangs is replaced. What ends the run: any other
    RunStoppedError, what code of the user's gives amiss, code that raises at several turns and at none of them alone,
    and actors that do not start.

    Any thread may ask. A context manager, whose end kills the actors. They start with `start`, or with the first turns,
    and nobody waits for them before. Raises RunStoppedError for an environment variable that is to be handed on, and is
    not set.
    """

    def __init__(self, config: EnvConfig, cluster: RayCluster) -> None:
        given_variables(config.pool)  # one that is missing is reported before ranks start to work
        self._config, self._cluster = config, cluster
        self._size, self._limits = config.pool_size, config.pool
        self._pieces = Pieces(self._size)
        self._thread = LoopThread("environments", self._fail)
        budget = Budget(
            self._limits.retries,
            *(_PAUSE_S, _LONGEST_PAUSE_S),
            final=lambda error: not isinstance(error, EnvironmentFailedError),
            report=lambda _number, _delay_s, error: self._report(error, "another one starts in its place"),
            in_a_row=True,
        )
        self._pool = Pool(
            "environment actor",
            self._build,
            budget,
            lost=cluster.lost,
            # Of a closed pool the loop ends before it would run.
            changed=lambda: None if self._pool.closed else self._thread.begin(self._attend()),
        )
        self._counts, self._taken = Counter[str](), Counter[str]()  # they only grow: one thread writes each
        self._reasons, self._reported = Counter[str](), set[str]()
        self._started = False

    def start(self) -> None:
        self._thread.begin(self._start())

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        asked = self._thread.call(self._replies(turns))
        try:
            # Each of the environments' calls has its deadline, and they all end when Ray is gone.
            with activity.at(f"waiting for replies to {len(turns)} answers", timed=False):
                while not wait([asked], timeout=_WAKE_EVERY_S).done:
                    pass
            return asked.result()
        finally:
            asked.cancel()

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        return await asyncio.wrap_future(self._thread.call(self._replies(turns)))

    def take_counts(self) -> dict[str, float]:
        now = Counter({**self._counts, _RESTARTS: self._pool.restarts})
        new, self._taken = now - self._taken, now
        return {name: float(new[name]) for name in (_DROPPED, _RETRIED, _RESTARTS)}

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        return dict(self._reasons)

    def __exit__(self, *_: object) -> None:
        with deferred_stop_signals():
            try:
                self._pool.stop_starts()
                self._thread.close()
            finally:
                self._pool.shutdown()

    # What runs in the thread of the loop

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._pool.start(range(self._size))
        while (lost := await asyncio.to_thread(self._session_lost)) is None:
            await asyncio.sleep(LOOK_EVERY_S)
        raise lost

    async def _replies(self, turns: Sequence[Turn]) -> list[Reply]:
        self.start()
        length = max(1, min(_LONGEST_PIECE, len(turns) // (_PIECES_AN_ACTOR * self._size)))
        if not self._limits.retries:
            length = 1  # one that fails is not taken apart any more
        parts = [self._reply(part) for part in batched(turns, length)]
        return [*chain.from_iterable(await asyncio.gather(*parts))]

    async def _reply(
        self, turns: Sequence[Turn], tries: int = 1, avoided: int | None = None
    ) -> Sequence[Reply]:
        try:
            return await self._pieces.replies(turns, avoided)
        except EnvironmentFailedError as failure:
            answers = f"{len(turns)} answer{'s' if len(turns) > 1 else ''}"
            if tries > (retries := self._limits.retries):
                self._report(failure, f"{answers} dropped after {tries} tries (env.pool.retries: {retries})")
                self._counts[_DROPPED] += len(turns)
                self._reasons[str(failure)] += len(turns)
                return [Reply(0.0, dropped=str(failure))] * len(turns)
            self._report(failure, f"{answers} tried again (env.pool.retries: {retries})")
            self._counts[_RETRIED] += len(turns)
            alone = [self._reply([turn], tries + 1, failure.number) for turn in turns]
            replies = [*chain.from_iterable(await asyncio.gather(*alone))]
            return replies if failure.lost else await self._together(turns, replies)

    async def _together(self, turns: Sequence[Turn], alone: list[Reply]) -> list[Reply]:
        """Return the replies to turns of which a call has raised, where no other call has any part in it.

        alone: to each by itself. Those that have one are shown together again: code that takes them one by one alone
        is wrong, and what it then says of each is not what it is meant to say.
        """
        kept = [turn for turn, reply in zip(turns, alone, strict=True) if reply.dropped is None]
        failure: EnvironmentFailedError | None = None
        for _ in range(self._limits.retries if len(kept) > 1 else 0):
            try:
                together = iter(await self._pieces.replies(kept, None))
                return [next(together) if reply.dropped is None else reply for reply in alone]
            except EnvironmentFailedError as error:
                if error.lost:
                    return alone
                failure = error
        if failure is None:
            return alone
        told = failure.report("", f"; {len(kept)} answers together, and none of them alone")
        self._fail(stopped := RunStoppedError(told, code=RAISED))
        raise stopped

    async def _attend(self) -> None:
        if isinstance(failure := self._pool.failure, EnvironmentFailedError):
            retries = self._limits.retries
            raise RunStoppedError(
                failure.report(f" did not start, as {retries + 1} in a row (env.pool.retries: {retries})")
            )
        if failure is not None:
            raise failure
        for actor in self._pool.live:
            if not actor.serves:
                actor.serves = True
                self._thread.begin(self._serve(actor))

    async def _serve(self, actor: SupervisedEnvironment) -> None:
        limit_s = self._limits.timeout_s
        late = f"no reply within {limit_s:g} s (env.pool.timeout_s)"
        while True:
            piece = await self._pieces.next(actor.number)
            try:
                asked = actor.handle.replies.remote(piece.turns, limit_s)
                replies = await actor.result(asked, limit_s, late)
            except EnvironmentFailedError as failure:
                piece.fail(failure)
                if failure.lost:
                    self._pool.lose(actor, failure)
                    return
            else:
                if not piece.replies.done():  # else nobody waits any more
                    piece.replies.set_result(replies)

    def _build(self, number: int) -> SupervisedEnvironment:
        limits = self._limits
        actor = SupervisedEnvironment.begin(
            actor_class(EnvironmentProcess, with_health=False),
            RankSlot(
                number,
                rank_environment(os.environ, on_cpu=not limits.num_gpus),
                {"num_cpus": 0, "num_gpus": limits.num_gpus, "scheduling_strategy": "SPREAD"},
            ),
            "environment actor",
            self._cluster,
            lambda: "the run ends" if self._pool.closed else self._cluster.lost(),
        )
        try:
            asyncio.run(actor.start(self._config))
        except BaseException:
            actor.end()
            raise
        return actor

    def _fail(self, error: BaseException) -> None:
        self._pieces.fail(self._session_lost() or error)

    def _session_lost(self) -> RanksFailedError | None:
        lost = self._cluster.lost()
        return None if lost is None else WorkerCall("replies", group="environments").end_of_session(lost)

    def _report(self, failure: Exception, what: str) -> None:
        """Print each reason once, as long as there are few: texts of the user's code may never be equal."""
        assert isinstance(failure, EnvironmentFailedError)  # others are final
        if str(failure) not in self._reported and len(self._reported) < _MOST_REASONS:
            self._reported.add(str(failure))
            write_line(sys.stderr, failure.report("", f"; {what}"))


class EnvironmentFailedError(Exception):
    """An environment gave no reply. The message says why in a line, equal for equal failures.

    number, actor: which one was asked. lost: whether that one is to be replaced. details: what else is known.
    """

    def __init__(self, reason: str, actor: Actor, *, lost: bool, details: str = "") -> None:
        super().__init__(reason)
        self.number, self.actor = actor.number, str(actor)
        self.lost, self.details = lost, details

    def report(self, before: str, after: str = "") -> str:
        return "\n".join(filter(None, [f"{self.actor}{before}: {self}{after}", self.details]))


@dataclass(eq=False)
class SupervisedEnvironment(Actor):
    """The driver's handle of an `EnvironmentProcess`, for one asyncio loop at a time: that of the thread that starts
    it, then that of the environments' thread.

    serves: whether the pool gives it turns. From then on it is the pool that reports the end of Ray: no reply is
    dropped for it.
    """

    serves: bool = field(default=False, init=False)

    async def start(self, config: EnvConfig) -> None:
        """Build the environment of a recipe. Raises EnvironmentFailedError, also for a start that takes too long."""
        limit_s = PROCESS_START_S
        deadline = time.monotonic() + limit_s
        late = f"did not start within {limit_s:g} s"
        if config.pool.num_gpus:  # which may not have been free
            late += f"; it asks for env.pool.num_gpus: {config.pool.num_gpus:g}"
        self.identity = await self.result(self.handle._identify.remote(), limit_s, late)
        construction = Construction((config, handed_objects()), environment=given_variables(config.pool))
        built = self.handle._build.remote(ray.put(construction))
        await self.result(built, deadline - time.monotonic(), late)

    async def result(self, ref: Any, within_s: float, late: str) -> Any:
        """Wait for the result of a call. late: what to say of one that gives nothing in time.

        Raises EnvironmentFailedError, and what ends the run: a RunStoppedError but what the user's code has raised.
        """
        deadline = time.monotonic() + within_s

        def over() -> str | None:
            lost = None if self.serves else self.lost()
            return lost or (late if time.monotonic() >= deadline else None)

        try:
            answer = await settled(ref, over, min(LOOK_EVERY_S, max(within_s / 8, 0.01)))
        except GivenUpError as why:
            raise EnvironmentFailedError(str(why), self, lost=True, details=self._stderr()) from None
        if (error := answer.exception()) is None:
            return answer.result()
        failure = self.failure(error)
        if failure.died:
            details = "\n".join(filter(None, [failure.details(), self._stderr()]))
            raise EnvironmentFailedError("its process died", self, lost=True, details=details)
        reason, details = failure.headline(), failure.details()
        if isinstance(failure.cause, RunStoppedError):
            if failure.cause.code != RAISED:
                raise failure.cause
            reason, _, details = str(failure.cause).partition("\n")
        raise EnvironmentFailedError(reason, self, lost=False, details=details)

    def _stderr(self) -> str:
        tail = stderr_tail(self.cluster.log_dir, self.identity) if self.identity else ""
        return tail and f"--- end of its standard error ---\n{tail}"


@dataclass(frozen=True, eq=False)
class TurnPiece:
    """Turns of one call of an environment. avoided: the actor that has failed with them, if one has."""

    turns: Sequence[Turn]
    avoided: int | None
    replies: asyncio.Future[list[Reply]]

    def fail(self, error: BaseException) -> None:
        if not self.replies.done():
            self.replies.set_exception(error)


@dataclass(eq=False)
class Pieces:
    """First in, first out, but for pieces that are tried again: they come first, and go to another actor.

    actors: how many take pieces; a single one takes all.
    """

    actors: int
    _waiting: deque[TurnPiece] = field(default_factory=deque[TurnPiece], init=False)
    _open: set[TurnPiece] = field(default_factory=set[TurnPiece], init=False)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)
    _failure: BaseException | None = field(default=None, init=False)

    async def replies(self, turns: Sequence[Turn], avoided: int | None) -> list[Reply]:
        if self._failure is not None:
            raise self._failure
        piece = TurnPiece(turns, avoided, asyncio.get_running_loop().create_future())
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

    async def next(self, actor: int) -> TurnPiece:
        async with self._changed:
            while True:
                for piece in self._waiting:
                    if self.actors == 1 or piece.avoided != actor:
                        self._waiting.remove(piece)
                        return piece
                await self._changed.wait()

    def fail(self, error: BaseException) -> None:
        """Raise this wherever a piece is, or will be, asked for; called in the loop."""
        self._failure = self._failure or error
        for piece in self._open:
            piece.fail(error)
