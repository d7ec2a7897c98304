"""A run's environments in Ray actors; a failed actor loses at most its turns, and changes no reply.

Three kinds of driver threads are involved: the callers' threads, which wait; the thread "environments", whose asyncio
loop sends pieces to actors and receives their replies; and a thread of `pool.Pool` for each start of an actor.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import batched, chain
from typing import Any

import ray

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import HANDED, RAISED
from nemo_rl_mcore.config.environment import PROCESS_START_S, RETRIES
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.activity import LoopThread
from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, GivenUpError, settled
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import WorkerCall, stderr_tail
from nemo_rl_mcore.driver.actors.places import RankSlot, given_variables, rank_environment
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.actors.supervised import Construction, actor_class
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.environment.registry import EnvironmentProcess
from nemo_rl_mcore.environment.turns import Reply, Turn
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError

_LONGEST_PIECE = 8
_PIECES_AN_ACTOR = 4
"""Minimum number of a call's pieces per actor, so that a slow piece does not delay the others."""
# Python handles signals between two waits.
_WAKE_EVERY_S = 0.2
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
_MOST_REASONS = 20
_DROPPED, _RETRIED, _RESTARTS = "env/dropped", "env/retried", "env/restarts"


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """An implementation of `Environments` with `env.pool.size` actors, each running the recipe's environment.

    A call's turns are split into pieces, which any actor can answer; replies do not depend on the actor or the time. If
    an actor raises, dies or exceeds `env.pool.timeout_s`, another actor retries its piece turn by turn, before other
    pieces; a turn without a reply after two retries is dropped. Dead or hung actors are replaced. The run ends
    on any other RunStoppedError, on invalid results from the user's code, on code that raises for several turns
    together but for none of them alone, and if actors do not start.

    Any thread may call the pool. The context's end kills the actors. `start` or the first turns begin to start them.
    Raises RunStoppedError if an environment variable to pass on is not set.
    """

    def __init__(self, config: EnvConfig, cluster: RayCluster) -> None:
        given_variables(config.pool)  # report a missing variable before the ranks start
        self._config, self._cluster = config, cluster
        self._size, self._limits = config.pool_size, config.pool
        self._waiting, self._open = deque[TurnPiece](), set[TurnPiece]()
        self._arrived = asyncio.Condition()
        self._failure: BaseException | None = None
        self._thread = LoopThread("environments", self._fail)
        budget = Budget(
            RETRIES,
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
            # A closed pool's loop would end before running it.
            changed=lambda: None if self._pool.closed else self._thread.begin(self._attend()),
        )
        # Counts only grow, and each of these counters is written by one thread.
        self._counts = Counter[str]()
        self._taken = Counter[str]()
        self.drop_reasons = Counter[str]()
        self._reported = set[str]()
        self._started = False

    def start(self) -> None:
        self._thread.begin(self._start())

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        asked = self._thread.call(self._replies(turns))
        try:
            # Each call to an environment has its own deadline, and all calls end if Ray dies.
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

    def __exit__(self, *_: object) -> None:
        with deferred_stop_signals():
            try:
                self._pool.stop_starts()
                self._thread.close()
            finally:
                self._pool.shutdown()

    # Run by the loop's thread

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
        parts = [self._reply(part) for part in batched(turns, length)]
        return [*chain.from_iterable(await asyncio.gather(*parts))]

    async def _reply(
        self, turns: Sequence[Turn], tries: int = 1, avoided: int | None = None
    ) -> Sequence[Reply]:
        try:
            return await self._ask(turns, avoided)
        except EnvironmentFailedError as failure:
            answers = f"{len(turns)} answer{'s' if len(turns) > 1 else ''}"
            if tries > RETRIES:
                self._report(failure, f"{answers} dropped after {tries} tries")
                self._counts[_DROPPED] += len(turns)
                self.drop_reasons[str(failure)] += len(turns)
                return [Reply(0.0, dropped=str(failure))] * len(turns)
            self._report(failure, f"{answers} tried again")
            self._counts[_RETRIED] += len(turns)
            alone = [self._reply([turn], tries + 1, failure.number) for turn in turns]
            replies = [*chain.from_iterable(await asyncio.gather(*alone))]
            return replies if failure.lost else await self._together(turns, replies)

    async def _together(self, turns: Sequence[Turn], alone: list[Reply]) -> list[Reply]:
        """Return the replies to turns for which a call has raised, independently of all other calls.

        alone: the reply to each turn by itself. The turns with a reply are sent together once more: code that can
        answer them only one by one is wrong, and its single replies may be wrong, too.
        """
        kept = [turn for turn, reply in zip(turns, alone, strict=True) if reply.dropped is None]
        failure: EnvironmentFailedError | None = None
        for _ in range(RETRIES if len(kept) > 1 else 0):
            try:
                together = iter(await self._ask(kept, None))
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

    async def _ask(self, turns: Sequence[Turn], avoided: int | None) -> list[Reply]:
        if self._failure is not None:
            raise self._failure
        piece = TurnPiece(turns, avoided, asyncio.get_running_loop().create_future())
        self._open.add(piece)
        (self._waiting.append if avoided is None else self._waiting.appendleft)(piece)
        try:
            async with self._arrived:
                self._arrived.notify_all()
            return await piece.replies
        finally:
            self._open.discard(piece)
            if piece in self._waiting:  # the caller no longer waits for it
                self._waiting.remove(piece)

    async def _attend(self) -> None:
        if isinstance(failure := self._pool.failure, EnvironmentFailedError):
            raise RunStoppedError(failure.report(f" did not start, as {RETRIES + 1} in a row"))
        if failure is not None:
            raise failure
        for actor in self._pool.live:
            if not actor.serves:
                actor.serves = True
                self._thread.begin(self._serve(actor))

    async def _serve(self, actor: SupervisedEnvironment) -> None:
        limit_s = self._limits.timeout_s
        late, alone = f"no reply within {limit_s:g} s (env.pool.timeout_s)", self._size == 1
        while True:
            async with self._arrived:
                while not (free := [one for one in self._waiting if one.avoided != actor.number or alone]):
                    await self._arrived.wait()
                piece = free[0]
                self._waiting.remove(piece)
            try:
                asked = actor.handle.replies.remote(piece.turns, limit_s)
                replies = await actor.result(asked, limit_s, late)
            except EnvironmentFailedError as failure:
                piece.fail(failure)
                if failure.lost:
                    self._pool.lose(actor, failure)
                    return
            else:
                if not piece.replies.done():  # otherwise the caller no longer waits
                    piece.replies.set_result(replies)

    def _fail(self, error: BaseException) -> None:
        """Fail all current and later pieces with this error; must be called in the loop's thread."""
        error = self._session_lost() or error
        self._failure = self._failure or error
        for piece in self._open:
            piece.fail(error)

    def _session_lost(self) -> RanksFailedError | None:
        lost = self._cluster.lost()
        return None if lost is None else WorkerCall("replies", group="environments").end_of_session(lost)

    def _report(self, failure: Exception, what: str) -> None:
        """Print each distinct reason once, up to a limit, since the user's code may never repeat a text."""
        assert isinstance(failure, EnvironmentFailedError)  # other errors end the run
        if str(failure) not in self._reported and len(self._reported) < _MOST_REASONS:
            self._reported.add(str(failure))
            write_line(sys.stderr, failure.report("", f"; {what}"))

    # Run by a thread of the pool

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

        async def start() -> None:
            deadline = time.monotonic() + PROCESS_START_S
            late = f"did not start within {PROCESS_START_S:g} s"
            if limits.num_gpus:  # GPUs may not have been free
                late += f"; it asks for env.pool.num_gpus: {limits.num_gpus:g}"
            actor.identity = await actor.result(actor.handle._identify.remote(), PROCESS_START_S, late)
            given = Construction((self._config, dict(HANDED)), environment=given_variables(limits))
            built = actor.handle._build.remote(ray.put(given))
            await actor.result(built, deadline - time.monotonic(), late)

        try:
            asyncio.run(start())
        except BaseException:
            actor.end()
            raise
        return actor


class EnvironmentFailedError(Exception):
    """An environment gave no reply; the message is a one-line reason, equal for equal failures.

    number, actor: the actor that was called. lost: True if the actor must be replaced. details: further text.
    """

    def __init__(self, reason: str, actor: Actor, *, lost: bool, details: str = "") -> None:
        super().__init__(reason)
        self.number, self.actor = actor.number, str(actor)
        self.lost, self.details = lost, details

    def report(self, before: str, after: str = "") -> str:
        return "\n".join(filter(None, [f"{self.actor}{before}: {self}{after}", self.details]))


@dataclass(eq=False)
class SupervisedEnvironment(Actor):
    """The driver's handle for an `EnvironmentProcess`; used in one asyncio loop at a time, first its start's loop.

    serves: True once the pool sends turns to this actor; from then on, the pool reports a dead Ray, and no reply is
    dropped because of it.
    """

    serves: bool = field(default=False, init=False)

    async def result(self, ref: Any, within_s: float, late: str) -> Any:
        """Wait for a call's result. late: the reason given if the result does not arrive in time.

        Raises EnvironmentFailedError, or any RunStoppedError except the user code's errors, which ends the run.
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
    """Turns from one call to an environment. avoided: the actor that failed on them, if any."""

    turns: Sequence[Turn]
    avoided: int | None
    replies: asyncio.Future[list[Reply]]

    def fail(self, error: BaseException) -> None:
        if not self.replies.done():
            self.replies.set_exception(error)
