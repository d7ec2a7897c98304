"""The driver's side of one supervised Ray actor: start, health checks, waits for its answers, and end.

Ranks, engines and environments are such actors; `supervised.py` runs in their processes. `gang.py` handles actors that
are called and lost as a whole (ranks, a single engine); `pool.py` replaces lost actors one by one (engines,
environments). In a refit, the first rank reaches the engines through `RayEngines`; ranks import nothing else from the
driver.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl_mcore.driver.actors.failures import RankFailure, RankIdentity
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.activity import Progress
from nemo_rl_mcore.rank.refit.sender import EngineLostError

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.cluster import RayCluster
    from nemo_rl_mcore.driver.actors.places import RankSlot

LOOK_EVERY_S = 1.0
# Parts of the texts of Ray's errors.
_HOST = re.compile(r"\bip[=:]\s*([\w.:]+\w)")
_PID = re.compile(r"\bpid[=:]\s*(\d+)")
_NODE = re.compile(r"\bnode has died[\s\S]*?Node I[dD]: (\w+)")


class GivenUpError(Exception):
    """The wait for an actor's answer was abandoned; the message is the reason."""


@dataclass(eq=False)
class Actor:
    """An actor under the driver's supervision; any thread may call `end`.

    number, noun: the actor's name in messages. lost: returns the reason why the actor is unreachable, or None.
    identity: the process's identity, once reported.
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
        """Begin to start an actor of a class from `actor_class`; Ray itself never restarts the actor."""
        variables = {"env_vars": dict(slot.environment)}
        options = {**slot.options, "max_restarts": 0, "max_task_retries": 0, "runtime_env": variables}
        return cls(slot.rank, noun, remote_class.options(**options).remote(), cluster, lost)

    def __str__(self) -> str:
        return f"{self.noun} {self.number} ({self.identity or 'starting'})"

    def end(self) -> None:
        """End the process at once, even a stopped one, which Ray cannot end; idempotent."""
        if not self._ended:  # later, another process may have the same pid
            self._ended = True
            self.cluster.kill(self.handle, self.identity)

    def failure(self, error: BaseException) -> RankFailure:
        """Convert Ray's error, a RayTaskError if a method raised, any other if the process died."""
        report, identity = str(error), self.identity
        if identity is None:  # it died before it was identified: the report has its host and process
            parts = (pattern.search(report) for pattern in (_HOST, _PID, _NODE))
            host, pid, node = (found and found[1] for found in parts)
            identity = RankIdentity(host or "unknown", int(pid or 0), ray_worker_id="", node_id=node or "")
        if isinstance(error, RayTaskError):
            return RankFailure(self.number, identity, report, error.cause, died=False)
        return RankFailure(self.number, identity, report)


async def settled(answer: Any, over: Callable[[], str | None], every_s: float = LOOK_EVERY_S) -> Future[Any]:
    """Await a call's end in an asyncio loop; raise GivenUpError with the reason that `over` returns.

    answer: Ray's reference. over: called at intervals; returns a reason to give up, or None.
    """
    loop, there = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(there.set)

    future: Future[Any] = answer.future()
    # Wait for an event: a future would reject some exceptions that actors may raise, and asyncio logs unread ones.
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
    """Polls actors for their progress without ever blocking on an answer.

    Its clock advances only in `due`, so that no deadline passes while the caller is busy elsewhere and cannot read the
    ranks' progress. progress: each rank's last reading.
    """

    actors: Sequence[Any]
    progress: dict[int, Progress] = field(default_factory=dict[int, Progress], init=False)
    _asked: dict[int, Any] = field(default_factory=dict[int, Any], init=False)
    _answered_at: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _clock_s: float = field(default=0.0, init=False)
    _moved_at: float = field(default=0.0, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _ticked_at: float = field(default_factory=time.monotonic, init=False)

    def due(self, every_s: float, *, passes: bool = True) -> bool:
        """Advance the clock by at most one polling interval, and return True if a poll is due."""
        if passes:
            now = time.monotonic()
            self._clock_s += min(now - self._ticked_at, LOOK_EVERY_S)
            self._ticked_at = now
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
                with suppress(RayError):  # a rank's death ends its call with an error
                    progress, _ = ray.get(asked)
                    self._answered_at[rank] = self._clock_s
                    if self.progress.get(rank) != progress:
                        self.progress[rank] = progress
                        self.moved()
                self._asked[rank] = self.actors[rank]._health.remote(False)

    def stalled(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Return True if no rank has made progress for this time, or a rank has not even answered."""
        return self._clock_s - self._moved_at >= timeout_s or self.silent(ranks, timeout_s)

    def silent(self, ranks: Collection[int], seconds: float) -> bool:
        return any(self._clock_s - self._answered_at.get(rank, 0.0) >= seconds for rank in ranks)

    def doing(self, rank: int) -> str:
        return self.progress[rank].doing if rank in self.progress else ""


@dataclass(frozen=True)
class RayEngines:
    """An implementation of `refit.sender.Engines` over actors with a method `load_bucket`.

    noun, numbers: the engines' names in messages; numbers count from 0 by default.
    """

    actors: Sequence[Any]
    noun: str = "engine"
    numbers: Sequence[int] | None = None

    def load_bucket(self, message: dict[str, Any]) -> list[Any]:
        shared = ray.put(message)  # stored once for all engines, even if the message carries the bytes
        return [actor.load_bucket.remote(shared) for actor in self.actors]

    def wait(self, loading: list[Any], timeout_s: float) -> None:
        numbers = range(len(self.actors)) if self.numbers is None else self.numbers
        for number, acknowledgement in zip(numbers, loading, strict=True):
            engine, deadline = f"{self.noun} {number}", time.monotonic() + timeout_s
            while not ray.wait([acknowledgement], timeout=min(LOOK_EVERY_S, timeout_s))[0]:
                # This wait has its own deadline, since the engine is late, not this rank.
                activity.advance(f"waiting for {engine}")
                if time.monotonic() >= deadline:
                    late = f"{engine} did not acknowledge a bucket of weights within {timeout_s:g} s"
                    raise EngineLostError(late, number)
            try:
                ray.get(acknowledgement)
            except RayActorError as error:
                raise EngineLostError(f"{engine} died during a refit", number) from error
