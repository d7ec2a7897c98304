"""The environments of a run in Ray actors: whatever becomes of one of these costs its turns at most, and no numbers.

Runs in the driver, in three kinds of threads: callers wait in theirs; one thread, "environments", has the asyncio loop
that gives pieces to actors and takes their replies; each start of an actor has a thread of `pool.Pool`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from itertools import batched, chain
from types import TracebackType
from typing import Self

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import RAISED
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.environment_actor import (
    EnvironmentActor,
    EnvironmentFailedError,
    given_variables,
)
from nemo_rl_mcore.driver.actors.environment_pieces import Pieces
from nemo_rl_mcore.driver.actors.failures import Call
from nemo_rl_mcore.driver.actors.pool import Budget, Pool
from nemo_rl_mcore.driver.loop_thread import LoopThread
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.signals import deferred_stop_signals
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


class EnvironmentPool:
    """Implements `interfaces.Environments` over `env.pool.size` actors, each with the environment of the recipe.

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
        self._pool = Pool(
            "environment actor",
            self._build,
            Budget(
                self._limits.retries,
                _PAUSE_S,
                _LONGEST_PAUSE_S,
                lambda error: not isinstance(error, EnvironmentFailedError),
                self._report_restart,
                in_a_row=True,
            ),
            lost=cluster.lost,
            changed=self._pool_changed,
        )
        self._counts, self._taken = Counter[str](), Counter[str]()  # they only grow: one thread writes each
        self._reasons, self._reported = Counter[str](), set[str]()
        self._started = False

    def start(self) -> None:
        """Have the actors start, in the background."""
        self._thread.begin(self._start())

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Environments.replies`; a signal is heard meanwhile."""
        asked = self._thread.call(self._replies(turns))
        try:
            # Each of the environments' calls has its deadline, and `_watch` ends them all when Ray is gone.
            with activity.at(f"waiting for replies to {len(turns)} answers", timed=False):
                while not wait([asked], timeout=_WAKE_EVERY_S).done:
                    pass
            return asked.result()
        finally:
            asked.cancel()

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Environments.replies_soon`."""
        return await asyncio.wrap_future(self._thread.call(self._replies(turns)))

    def take_counts(self) -> dict[str, float]:
        """See `interfaces.Environments.take_counts`."""
        now = Counter({**self._counts, _RESTARTS: self._pool.restarts})
        new, self._taken = now - self._taken, now
        return {name: float(new[name]) for name in (_DROPPED, _RETRIED, _RESTARTS)}

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """See `interfaces.Environments.drop_reasons`."""
        return dict(self._reasons)

    def close(self) -> None:
        """End all actors; idempotent. Who still waits for replies is cancelled."""
        with deferred_stop_signals():
            try:
                self._pool.stop_starts()
                self._thread.close()
            finally:
                self._pool.shutdown()

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # What runs in the thread of the loop

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.begin(self._watch())
            self._pool.start(range(self._size))

    async def _replies(self, turns: Sequence[Turn]) -> list[Reply]:
        await self._start()
        parts = [self._reply(part) for part in batched(turns, self._piece_length(len(turns)))]
        return [*chain.from_iterable(await asyncio.gather(*parts))]

    def _piece_length(self, turns: int) -> int:
        if not self._limits.retries:
            return 1  # one that fails is not taken apart any more
        return max(1, min(_LONGEST_PIECE, turns // (_PIECES_AN_ACTOR * self._size)))

    async def _reply(
        self, turns: Sequence[Turn], tries: int = 1, avoided: int | None = None
    ) -> Sequence[Reply]:
        """Return the replies to a piece; where it fails, to each of its turns alone."""
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

    async def _serve(self, actor: EnvironmentActor) -> None:
        """Have an actor answer pieces, one after another, until it is lost."""
        while True:
            piece = await self._pieces.next(actor.number)
            try:
                piece.give(await actor.ask(piece.turns, self._limits.timeout_s))
            except EnvironmentFailedError as failure:
                piece.fail(failure)
                if failure.lost:
                    self._pool.lose(actor, failure)
                    return

    async def _attend(self) -> None:
        """Give pieces to actors that have started; raise why there will be no more of them."""
        if (failure := self._pool.failure) is not None:
            raise self._not_started(failure)
        for actor in self._pool.live:
            if not actor.serves:
                actor.serves = True
                self._thread.begin(self._serve(actor))

    # What runs in the thread of a start

    def _build(self, number: int) -> EnvironmentActor:
        actor = EnvironmentActor.of(number, self._cluster, self._limits, self._ended)
        try:
            asyncio.run(actor.start(self._config))
        except BaseException:
            actor.end()
            raise
        return actor

    # What any thread may ask

    def _ended(self) -> str | None:
        return "the run ends" if self._pool.closed else self._cluster.lost()

    def _pool_changed(self) -> None:
        if not self._pool.closed:  # else the loop ends before it would run
            self._thread.begin(self._attend())

    def _not_started(self, failure: Exception) -> Exception:
        if not isinstance(failure, EnvironmentFailedError):
            return failure
        retries = self._limits.retries
        return RunStoppedError(
            failure.report(f" did not start, as {retries + 1} in a row (env.pool.retries: {retries})")
        )

    async def _watch(self) -> None:
        """Raise the end of the Ray session, for those who wait."""
        while (lost := await asyncio.to_thread(self._session_lost)) is None:
            await asyncio.sleep(LOOK_EVERY_S)
        raise lost

    def _fail(self, error: BaseException) -> None:
        """End the run; a Ray that is gone is why its calls fail, too."""
        self._pieces.fail(self._session_lost() or error)

    def _session_lost(self) -> RanksFailedError | None:
        lost = self._cluster.lost()
        return None if lost is None else Call("replies", group="environments").end_of_session(lost)

    def _report_restart(self, _number: int, _delay_s: float, failure: Exception) -> None:
        assert isinstance(failure, EnvironmentFailedError)  # others are final
        self._report(failure, "another one starts in its place")

    def _report(self, failure: EnvironmentFailedError, what: str) -> None:
        """Print each reason once, as long as there are few: texts of the user's code may never be equal."""
        if str(failure) not in self._reported and len(self._reported) < _MOST_REASONS:
            self._reported.add(str(failure))
            write_line(sys.stderr, failure.report("", f"; {what}"))
