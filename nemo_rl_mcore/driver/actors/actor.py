"""One supervised Ray actor, as the driver sees it: its start, its health, the wait for its answers, its end.

Ranks, engines and environments are all such actors; `supervised.py` is what runs in their processes. `gang.py` says
what becomes of several that are called, and end, as a whole (ranks, and an engine alone); `pool.py` replaces one by one
those that are lost (engines, environments). `HealthWatch` belongs to the thread that waits, and any thread may call
`Actor.end`. `RayEngines` are engines as the first rank reaches them in a refit; a rank imports no more of the driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl_mcore.driver.actors.failures import RankFailure, RankIdentity, identity_in
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.activity import Progress
from nemo_rl_mcore.rank.refit.sender import EngineLostError

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.cluster import RayCluster
    from nemo_rl_mcore.driver.actors.places import RankSlot

LOOK_EVERY_S = 1.0
"""Between two looks at whether a wait goes on."""


class GivenUpError(Exception):
    """Nobody waits for an actor's answer any more; the message says why."""


@dataclass(eq=False)
class Actor:
    """One actor, as the driver supervises it.

    number, noun: what messages call it. handle: Ray's. lost: says what has ended without which it cannot be reached,
    None while nothing has. identity: of its process, once that has said so.
    """

    number: int
    noun: str
    handle: Any
    cluster: RayCluster
    lost: Callable[[], str | None]
    identity: RankIdentity | None = None
    _ended: bool = field(default=False, init=False)

    @classmethod
    def begin(
        cls, remote_class: Any, slot: RankSlot, noun: str, cluster: RayCluster, lost: Callable[[], str | None]
    ) -> Self:
        """Have Ray start an actor of a class from `actor_class`, and wait for nothing; no one but us restarts it."""
        options = remote_class.options(
            **slot.options,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": dict(slot.environment)},
        )
        return cls(slot.rank, noun, options.remote(), cluster, lost)

    def __str__(self) -> str:
        return f"{self.noun} {self.number} ({self.identity or 'starting'})"

    def end(self) -> None:
        """End the process at once, also one that is stopped, which does not hear Ray; idempotent."""
        if not self._ended:  # its pid may be another's later
            self._ended = True
            self.cluster.kill(self.handle, self.identity)

    def failure(self, error: BaseException) -> RankFailure:
        """Tell from an error of Ray's a method that raised from the end of the process."""
        identity = self.identity or identity_in(str(error))
        if isinstance(error, RayTaskError):
            return RankFailure(self.number, identity, str(error), error.cause, died=False)
        return RankFailure(self.number, identity, str(error))


async def settled(answer: Any, over: Callable[[], str | None], every_s: float = LOOK_EVERY_S) -> Future[Any]:
    """Wait in an asyncio loop for what a call gives or raises; raises GivenUpError with what `over` says.

    answer: Ray's reference. over: asked every so many seconds; says why the wait ends, None while it goes on.
    """
    loop, there = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(there.set)

    future: Future[Any] = answer.future()
    # Not awaited itself: asyncio refuses some exceptions that an actor may raise, and reports unread ones.
    future.add_done_callback(notify)
    while not future.done():
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await there.wait()
        if not future.done() and (why := over()) is not None:
            raise GivenUpError(why)
    return future


@dataclass(eq=False)
class HealthWatch:
    """Polls actors for their progress, without ever waiting for the answer.

    Its clock goes while it is watched, by `tick` after `tick`: a caller who did something else for a while has not
    heard what the ranks said meanwhile, and their deadlines do not pass.
    """

    actors: Sequence[Any]
    progress: dict[int, Progress] = field(default_factory=dict[int, Progress], init=False)
    """Of each rank, as it said last."""
    _asked: dict[int, Any] = field(default_factory=dict[int, Any], init=False)
    _answered_at: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _clock_s: float = field(default=0.0, init=False)
    _moved_at: float = field(default=0.0, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _ticked_at: float = field(default_factory=time.monotonic, init=False)

    def tick(self) -> None:
        """Let the time since the last tick pass, at most that from one look to the next."""
        now = time.monotonic()
        self._clock_s += min(now - self._ticked_at, LOOK_EVERY_S)
        self._ticked_at = now

    def due(self, every_s: float) -> bool:
        return self._clock_s - self._looked_at >= every_s

    def moved(self) -> None:
        self._moved_at = self._clock_s

    def look(self, ranks: Collection[int]) -> None:
        self._looked_at = self._clock_s
        for rank in ranks:
            asked = self._asked.get(rank)
            if asked is None:
                self._asked[rank] = self.actors[rank]._health.remote(False)
            elif ray.wait([asked], timeout=0)[0]:
                with suppress(RayError):  # a rank that died says so by its call
                    health: Any = ray.get(asked)
                    progress = health.progress
                    self._answered_at[rank] = self._clock_s
                    if self.progress.get(rank) != progress:
                        self.progress[rank] = progress
                        self.moved()
                self._asked[rank] = self.actors[rank]._health.remote(False)

    def stalled(self, ranks: Collection[int], timeout_s: float) -> bool:
        """None of the ranks has moved for so long, or one of them has not even answered."""
        return self._clock_s - self._moved_at >= timeout_s or self.silent(ranks, timeout_s)

    def silent(self, ranks: Collection[int], seconds: float) -> bool:
        return any(self._clock_s - self._answered_at.get(rank, 0.0) >= seconds for rank in ranks)

    def doing(self, rank: int) -> str:
        return self.progress[rank].doing if rank in self.progress else ""


@dataclass(frozen=True)
class RayEngines:
    """`refit.sender.Engines` over actors with a method `load_bucket`.

    noun: what messages call one of them. numbers: of the engines in messages; left out, they count from 0.
    """

    actors: Sequence[Any]
    noun: str = "engine"
    numbers: Sequence[int] | None = None

    def load_bucket(self, message: dict[str, Any]) -> list[Any]:
        shared = ray.put(message)  # once for all engines, also where the message brings the bytes
        return [actor.load_bucket.remote(shared) for actor in self.actors]

    def wait(self, loading: list[Any], timeout_s: float) -> None:
        numbers = range(len(self.actors)) if self.numbers is None else self.numbers
        for number, acknowledgement in zip(numbers, loading, strict=True):
            engine, deadline = f"{self.noun} {number}", time.monotonic() + timeout_s
            while not ray.wait([acknowledgement], timeout=min(LOOK_EVERY_S, timeout_s))[0]:
                # This wait has its own deadline: the engine is late, not this rank.
                activity.advance(f"waiting for {engine}")
                if time.monotonic() >= deadline:
                    late = f"{engine} did not acknowledge a bucket of weights within {timeout_s:g} s"
                    raise EngineLostError(late, number)
            try:
                ray.get(acknowledgement)
            except RayActorError as error:
                raise EngineLostError(f"{engine} died during a refit", number) from error
