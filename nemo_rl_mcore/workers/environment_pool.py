"""The environments of a run in Ray actors: whatever becomes of one of these costs its turns at most, and no numbers."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from itertools import batched, chain
from types import TracebackType
from typing import Self

from nemo_rl_mcore import activity
from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError
from nemo_rl_mcore.loop_thread import LoopThread
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.signals import deferred_stop_signals
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.environment_actor import EnvironmentActor, EnvironmentFailedError, given_variables
from nemo_rl_mcore.workers.environment_pieces import Pieces
from nemo_rl_mcore.workers.failures import Call

_LONGEST_PIECE = 8
_PIECES_AN_ACTOR = 4
"""Of a call, at least: so that a slow one does not keep the others waiting."""
# Python hears of signals between two waits.
_WAKE_EVERY_S = 0.2
_LOOK_EVERY_S = 1.0
_LONGEST_PAUSE_S = 30.0
_REASONS_TOLD = 20
_DROPPED, _RETRIED, _RESTARTS = "env/dropped", "env/retried", "env/restarts"


class EnvironmentPool:
    """Implements `interfaces.Environments` over `env.pool.size` actors, each with the environment of the recipe.

    The turns of a call are split into pieces, which any actor answers; which one does, and when, changes no reply. A
    piece whose actor raises, dies or passes `env.pool.timeout_s` is tried again turn by turn, and a turn without a
    reply after `env.pool.retries` is dropped. An actor that died or hangs is replaced. A RunStoppedError that no code
    of the user's own has raised ends the run, as do actors that do not start.

    All state belongs to an asyncio loop in a thread of its own; any thread may ask. A context manager, whose end kills
    the actors. They start with `start`, or with the first turns, and nobody waits for them before.
    Raises RunStoppedError for an environment variable that is to be handed on, and is not set.
    """

    def __init__(self, config: EnvConfig, cluster: RayCluster) -> None:
        given_variables(config.pool)  # one that is missing is told before ranks start to work
        self._config, self._cluster = config, cluster
        self._size, self._limits = config.pool_size, config.pool
        self._pieces = Pieces(self._size)
        self._thread = LoopThread("environments", self._fail)
        self._actors: dict[int, EnvironmentActor] = {}
        self._counts, self._taken = Counter[str](), Counter[str]()  # they only grow: one thread writes each
        self._reasons, self._told = Counter[str](), set[str]()
        self._started = False

    def start(self) -> None:
        """Have the actors start, in the background."""
        self._thread.begin(self._start())

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Environments.replies`; a signal is heard meanwhile."""
        asked = self._thread.call(self._replies(turns))
        try:
            # Each of the environments' calls has a deadline of its own.
            with activity.at(f"waiting for replies to {len(turns)} answers", timed=False):
                while not wait([asked], timeout=_WAKE_EVERY_S).done:
                    if (lost := self._session_lost()) is not None:
                        raise lost
            return asked.result()
        finally:
            asked.cancel()

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `interfaces.Environments.replies_soon`."""
        return await asyncio.wrap_future(self._thread.call(self._replies(turns)))

    def take_counts(self) -> dict[str, float]:
        """See `interfaces.Environments.take_counts`."""
        now = Counter(self._counts)
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
                self._thread.close()
            finally:
                for actor in self._actors.values():
                    actor.kill()

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
            for number in range(self._size):
                self._thread.begin(self._serve(number))

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
        """The replies to a piece; where it fails, to each of its turns alone."""
        try:
            return await self._pieces.replies(turns, avoided)
        except EnvironmentFailedError as failure:
            answers = f"{len(turns)} answer{'s' if len(turns) > 1 else ''}"
            if tries > (retries := self._limits.retries):
                self._tell(failure, f"{answers} dropped after {tries} tries (env.pool.retries: {retries})")
                self._counts[_DROPPED] += len(turns)
                self._reasons[str(failure)] += len(turns)
                return [Reply(0.0, dropped=str(failure))] * len(turns)
            self._tell(failure, f"{answers} tried again (env.pool.retries: {retries})")
            self._counts[_RETRIED] += len(turns)
            alone = [self._reply([turn], tries + 1, failure.number) for turn in turns]
            return [*chain.from_iterable(await asyncio.gather(*alone))]

    async def _serve(self, number: int) -> None:
        """Have an actor answer pieces, one after another, and start another one whenever it is lost."""
        while True:
            actor = await self._started_actor(number)
            serves = True
            while serves:
                piece = await self._pieces.next(number)
                try:
                    piece.give(await actor.ask(piece.turns, self._limits.timeout_s))
                except EnvironmentFailedError as failure:
                    piece.fail(failure)
                    serves = not failure.lost
            actor.kill()

    async def _started_actor(self, number: int) -> EnvironmentActor:
        """A new actor; RunStoppedError once `env.pool.retries` and one more in a row did not start."""
        tried, retries = 0, self._limits.retries
        while True:
            self._counts[_RESTARTS] += number in self._actors
            actor = self._actors[number] = EnvironmentActor(number, self._cluster, self._limits)
            try:
                await actor.start(self._config)
                return actor
            except EnvironmentFailedError as failure:
                actor.kill()
                tried += 1
                if tried > retries:
                    told = f"{actor} did not start, as {tried} in a row (env.pool.retries: {retries})"
                    raise RunStoppedError(_in_lines(f"{told}: {failure}", failure.details)) from failure
                self._tell(failure, "another one starts in its place")
            await asyncio.sleep(min(2.0**tried, _LONGEST_PAUSE_S))

    async def _watch(self) -> None:
        """Raise the end of the Ray session, for those who wait."""
        while (lost := await asyncio.to_thread(self._session_lost)) is None:
            await asyncio.sleep(_LOOK_EVERY_S)
        raise lost

    def _fail(self, error: BaseException) -> None:
        """End the run; a Ray that is gone is why its calls fail, too."""
        self._pieces.fail(self._session_lost() or error)

    def _session_lost(self) -> RanksFailedError | None:
        lost = self._cluster.lost()
        return None if lost is None else Call("replies", group="environments").end_of_session(lost)

    def _tell(self, failure: EnvironmentFailedError, what: str) -> None:
        """Tell each reason once, as long as there are few: texts of the user's own may never be equal."""
        if str(failure) not in self._told and len(self._told) < _REASONS_TOLD:
            self._told.add(str(failure))
            told = f"{failure.actor}: {failure}; {what}"
            write_line(sys.stderr, _in_lines(told, failure.details))


def _in_lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))
