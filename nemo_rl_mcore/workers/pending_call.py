"""A call that the ranks of a group are at: whether it is over, what it gave, or the one error that tells why not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_mcore import activity
from nemo_rl_mcore.activity import Progress
from nemo_rl_mcore.signals import deferred_stop_signals
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.failures import (
    Call,
    RankIdentity,
    Stall,
    WorkerError,
    describe,
    describe_stall,
    identity_in,
    root_cause,
)
from nemo_rl_mcore.workers.rank_calls import Ended, RankCalls, failure_of

# Python hears of signals between two waits, and of two signals that came during one it hears once.
_WAKE_EVERY_S = 0.2
_KILL_WAIT_S = 2.0


class GroupInUseError(RuntimeError):
    """A group was called while a call to it was pending, or two threads asked for the result of one at once."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group.

    noun: what messages call one of them. identities: of those that have said theirs. first: the number of the first one
    in messages. lost: says what has ended without which none can be reached.
    """

    cluster: RayCluster
    noun: str
    actors: Sequence[Any]
    identities: Mapping[int, RankIdentity]
    first: int
    lost: Callable[[], str | None]

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks, stopped processes too, which do not hear Ray."""
        for rank in ranks:
            self.cluster.kill(self.actors[rank], self.identities.get(rank))


class PendingCall:
    """What `RayWorkerGroup.call` has begun; one thread at a time asks it.

    It is pending until `result` has given or raised what came of it, and the group takes no other call before. Calls to
    several groups are waited for together by asking each whether it is `done`, about every second: progress is heard,
    and deadlines pass, only while somebody asks or waits.

    refs: rank by Ray's reference of its answer.
    """

    def __init__(self, call: Call, ranks: Ranks, refs: Mapping[Any, int]) -> None:
        self.over = False
        """Whether `result` has told how it ended."""
        self.error: WorkerError | None = None
        """What `result` has raised."""
        self._call, self._ranks = call, ranks
        self._calls = RankCalls(refs, ranks.actors, call.timeout_s, ranks.lost, self._gone)
        self._ended: Ended | None = None
        self._asking = threading.Lock()

    def __str__(self) -> str:
        """Method and context."""
        return str(self._call)

    @property
    def timeout_s(self) -> float:
        """The deadline, in seconds without progress of any rank."""
        return self._call.timeout_s

    @property
    def progress(self) -> Mapping[int, Progress]:
        """What each rank said last, of those that have said anything; any thread may ask."""
        return dict(self._calls.watch.progress)

    def done(self) -> bool:
        """Whether `result` has no more to wait for: the ranks have answered, or the call has failed. Never waits.

        Raises GroupInUseError when another thread asks, too.
        """
        with self._one_thread():
            return self._poll(0)

    def result(self) -> list[Any]:
        """Wait for the answers, in the order of the ranks; a first Ctrl-C or SIGTERM waits until the call is over.

        Raises WorkerError: see `RayWorkerGroup`. GroupInUseError when another thread asks, too.
        """
        with deferred_stop_signals():
            return self.interruptible_result()

    def interruptible_result(self) -> list[Any]:
        """As `result`, but no signal has to wait: for workers that nobody else has heard of yet."""
        with self._one_thread(), activity.at(self._at):
            if not self.over:
                self._finish()
            if self.error is not None:
                raise self.error
            return [answer for _, answer in sorted(self._calls.results.items(), key=lambda item: item[0])]

    def _at(self) -> str:
        """The call, and what each rank that is waited for said last."""
        said = self.progress
        told = [
            f"{rank} at {said[rank].doing!r}" if rank in said else f"{rank} silent"
            for rank in self._calls.waiting
        ]
        return f"{self}: {self._ranks.noun} {', '.join(told) or 'none'}"

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._asking.acquire(blocking=False):
            raise GroupInUseError(f"{self}: another thread asks for its result; one at a time")
        try:
            yield
        finally:
            self._asking.release()

    def _poll(self, wait_s: float) -> bool:
        if self._ended is None:
            self._ended = self._calls.poll(wait_s)
        return self._ended is not None

    def _finish(self) -> None:
        try:
            while not self._poll(_WAKE_EVERY_S):
                pass
            self.error = None if self._ended is Ended.ANSWERED else self._failure()
        except BaseException:  # a second Ctrl-C: nobody knows where the ranks are
            self.error = self._call.error(f"{self} was interrupted", code="interrupted")
            raise
        finally:
            self.over = True

    def _failure(self) -> WorkerError:
        """What went wrong; ranks that do not return are killed."""
        calls, ranks, call = self._calls, self._ranks, self._call
        failures = [
            failure_of(ranks.first + rank, self._identity(rank, error), error) for rank, error in calls.errors
        ]
        # Ranks that all answered, if only by raising, still serve: an open train step can be aborted.
        usable = not calls.waiting and not any(failure.died for failure in failures)
        if not usable and (lost := ranks.lost()) is not None:
            return call.end_of_session(lost)
        failures = [
            replace(failure, lost_node=ranks.cluster.lost_node(failure.identity)) if failure.died else failure
            for failure in failures
        ]
        stalls = self._stalls()
        ranks.kill(calls.waiting)
        # Else Ray logs the answers of the dead; that of one whose machine is gone takes it long.
        calls.wait_at_most(_KILL_WAIT_S if stalls and _lost_node(stalls) is None else 0)
        if self._ended is Ended.GONE:
            failures = [failure for stall in stalls if (failure := stall.as_lost()) is not None]
            stalls = [stall for stall in stalls if stall.lost_node is None]
        if self._ended in (Ended.STALLED, Ended.SILENT):
            stopping = self._ended is Ended.SILENT
            message = describe_stall(stalls, len(ranks.actors), call, ranks.noun, stopping=stopping)
            return call.error(message, lost_node=_lost_node(stalls), code="no-progress")
        message = describe(failures, stalls, str(call), ranks.cluster.log_dir, ranks.noun)
        return call.error(message, root_cause(failures), usable=usable, lost_node=_lost_node(stalls))

    def _stalls(self) -> list[Stall]:
        """What is known of the ranks that have not answered; it is asked for before they are killed."""
        calls, ranks = self._calls, self._ranks
        gone = self._gone(calls.waiting)
        stacks = calls.stacks(gone) if calls.waiting else {}
        return [
            Stall(
                ranks.first + rank,
                identity := ranks.identities.get(rank),
                doing=calls.watch.doing(rank),
                stack=stacks.get(rank, ""),
                silent=None if rank in stacks else ranks.cluster.process_state(identity),
                lost_node=gone.get(rank),
            )
            for rank in calls.waiting
        ]

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those whose machine is gone, and which it is."""
        identities = self._ranks.identities
        asked = {rank: identities[rank].node_id for rank in ranks if rank in identities}
        lost = self._ranks.cluster.lost_nodes({*asked.values()})
        return {rank: lost[node] for rank, node in asked.items() if node in lost}

    def _identity(self, rank: int, error: BaseException) -> RankIdentity:
        return self._ranks.identities.get(rank) or identity_in(str(error))


def _lost_node(stalls: Iterable[Stall]) -> str | None:
    return next((stall.lost_node for stall in stalls if stall.lost_node is not None), None)
