"""The answers of ranks as they come: until all are there, one failed, none makes progress, or Ray itself is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_rl_mcore.activity import Progress
from nemo_rl_mcore.signals import current_stop_signals
from nemo_rl_mcore.workers.failures import RankFailure, RankIdentity
from nemo_rl_mcore.workers.rank_actor import Health

_LOOK_EVERY_S = 1.0
_GRACE_S = 5.0
_GRACE_AFTER_A_DEATH_S = 1.0  # what died is the cause, whatever the others report
_STACKS_WITHIN_S = 2.0
_ANSWERS_WITHIN_S = 3.0


class Ended(Enum):
    """Why a call is over."""

    ANSWERED = "all ranks answered"
    FAILED = "a rank failed"
    STALLED = "no progress"
    SILENT = "a rank does not answer, and the run is to stop"
    LOST = "Ray is gone"
    GONE = "the machine of a rank is gone"


class HealthWatch:
    """Asks ranks how far they are, without ever waiting for the answer.

    Its clock goes while it is watched, by `tick` after `tick`: a caller who did something else for a while has not
    heard what the ranks said meanwhile, and their deadlines do not pass.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self.progress: dict[int, Progress] = {}
        """What each rank said last."""
        self._actors = actors
        self._asked: dict[int, Any] = {}
        self._answered_at: dict[int, float] = {}
        self._clock_s = self._moved_at = self._looked_at = 0.0
        self._ticked_at = time.monotonic()

    def tick(self) -> None:
        """Let the time since the last tick pass, as far as it is no more than the time from one look to the next."""
        now = time.monotonic()
        self._clock_s += min(now - self._ticked_at, _LOOK_EVERY_S)
        self._ticked_at = now

    def due(self, every_s: float) -> bool:
        """Whether the last look is so long ago."""
        return self._clock_s - self._looked_at >= every_s

    def moved(self) -> None:
        """Count what just happened as progress."""
        self._moved_at = self._clock_s

    def look(self, ranks: Collection[int]) -> None:
        """Take the answers that have come, and ask the ranks anew."""
        self._looked_at = self._clock_s
        for rank in ranks:
            asked = self._asked.get(rank)
            if asked is None:
                self._asked[rank] = self._actors[rank]._health.remote(False)
            elif ray.wait([asked], timeout=0)[0]:
                with suppress(RayError):  # a rank that died tells so by its call
                    self._take(rank, ray.get(asked))
                self._asked[rank] = self._actors[rank]._health.remote(False)

    def _take(self, rank: int, health: Health) -> None:
        self._answered_at[rank] = self._clock_s
        if self.progress.get(rank) != health.progress:
            self.progress[rank] = health.progress
            self.moved()

    def stalled(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Whether none of the ranks has moved for so long, or one of them has not even answered."""
        return self._clock_s - self._moved_at >= timeout_s or self.silent(ranks, timeout_s)

    def silent(self, ranks: Collection[int], seconds: float) -> bool:
        """Whether one of the ranks has not answered for so long."""
        return any(self._clock_s - self._answered_at.get(rank, 0.0) >= seconds for rank in ranks)

    def doing(self, rank: int) -> str:
        """What a rank began last, as far as is known."""
        return self.progress[rank].doing if rank in self.progress else ""


class RankCalls:
    """One call to several ranks, under way.

    refs: rank by Ray's reference of its answer. timeout_s: seconds without progress of any rank. lost: says what of Ray
    itself has died. gone: those of some ranks whose machine is.
    """

    def __init__(
        self,
        refs: Mapping[Any, int],
        actors: Sequence[Any],
        timeout_s: float,
        lost: Callable[[], str | None],
        gone: Callable[[Sequence[int]], Collection[int]] = lambda ranks: (),
    ) -> None:
        self._refs, self._gone = dict(refs), gone
        self._actors, self._timeout_s, self._lost = actors, timeout_s, lost
        self._failed_at = 0.0
        self.watch = HealthWatch(actors)
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, RayError]] = []
        """Rank and error, in the order of their arrival."""

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return sorted(self._refs.values())

    def poll(self, wait_s: float) -> Ended | None:
        """Take the answers that come within so many seconds; says why the call is over, None while it is not.

        After the first failure the other ranks have a grace to report theirs.
        """
        self.watch.tick()
        self.take(wait_s)
        if not self._refs:
            return Ended.FAILED if self.errors else Ended.ANSWERED
        if self.errors:
            return Ended.FAILED if time.monotonic() - self._failed_at >= self._grace_s else None
        if self.watch.due(min(_LOOK_EVERY_S, self._timeout_s / 4)):
            if self._lost() is not None:
                return Ended.LOST
            if self._gone(self.waiting):  # Ray says so some seconds later
                return Ended.GONE
            self.watch.look(self.waiting)
            if self.watch.stalled(self.waiting, self._timeout_s):
                return Ended.STALLED
            # What hangs would never hear of the stop; what only takes long answers, and is waited for.
            if current_stop_signals().asked and self.watch.silent(self.waiting, _ANSWERS_WITHIN_S):
                return Ended.SILENT
        return None

    @property
    def _grace_s(self) -> float:
        died = any(not isinstance(error, RayTaskError) for _, error in self.errors)
        return _GRACE_AFTER_A_DEATH_S if died else _GRACE_S

    def take(self, wait_s: float) -> None:
        """Take the answers that are there, if need be wait so long for one."""
        wanted = 1
        while self._refs and (ready := ray.wait(list(self._refs), num_returns=wanted, timeout=wait_s)[0]):
            for ref in ready:
                self._take(ref)
            wait_s, wanted = 0, len(self._refs)  # one by one it would cost the square of the ranks

    def wait_at_most(self, seconds: float) -> None:
        """Take the answers that come within so many seconds, progress or not."""
        deadline = time.monotonic() + seconds
        while self._refs and (left := deadline - time.monotonic()) > 0:
            self.take(left)

    def stacks(self, gone: Collection[int]) -> dict[int, str]:
        """Where those that have not answered stand in their Python code, if they say so; those that are gone do not."""
        answering = [
            rank
            for rank in self.waiting
            if rank not in gone and not self.watch.silent([rank], _ANSWERS_WITHIN_S)
        ]
        asked = {self._actors[rank]._health.remote(True): rank for rank in answering}
        ready, _ = (
            ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_WITHIN_S) if asked else ([], [])
        )
        stacks: dict[int, str] = {}
        for ref in ready:
            with suppress(RayError):
                stacks[asked[ref]] = ray.get(ref).stack
        return stacks

    def _take(self, ref: Any) -> None:
        rank = self._refs[ref]
        self.watch.moved()
        try:
            self.results[rank] = ray.get(ref)
        except RayError as error:
            if not self.errors:
                self._failed_at = time.monotonic()
            self.errors.append((rank, error))
        del self._refs[ref]  # last: a Ctrl-C before it has the answer taken once more


def failure_of(rank: int, identity: RankIdentity, error: BaseException) -> RankFailure:
    """Return what Ray reports of a rank."""
    raised = isinstance(error, RayTaskError)
    return RankFailure(rank, identity, str(error), error.cause if raised else None, died=not raised)
