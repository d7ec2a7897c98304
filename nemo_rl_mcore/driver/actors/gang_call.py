"""One call to the ranks of a gang: whether it is over, what it gave, or the one error that says why not.

Runs in the driver, in the thread that asks: answers are taken, progress is heard and deadlines pass in it alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, HealthWatch
from nemo_rl_mcore.driver.actors.failures import (
    Call,
    Stall,
    WorkerError,
    describe,
    describe_stall,
    root_cause,
)
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.activity import Progress

# Python hears of signals between two waits, and of two signals that came during one it hears once.
_WAKE_EVERY_S = 0.2
_KILL_WAIT_S = 2.0
_GRACE_S = 5.0
_GRACE_AFTER_A_DEATH_S = 1.0  # what died is the cause, whatever the others report
_STACKS_WITHIN_S = 2.0
_ANSWERS_WITHIN_S = 3.0


class Ended(Enum):
    """Names why a call is over."""

    ANSWERED = "all ranks answered"
    FAILED = "a rank failed"
    STALLED = "no progress"
    SILENT = "a rank does not answer, and the run is to stop"
    LOST = "Ray is gone"
    GONE = "the machine of a rank is gone"


class GroupInUseError(RuntimeError):
    """A group was called while a call to it was pending, or two threads asked for the result of one at once."""


class PendingCall:
    """Waits for what `RayWorkerGroup.call` has begun; one thread at a time asks it.

    It is pending until `result` has given or raised what came of it, and the group takes no other call before. Calls to
    several groups are waited for together by asking each whether it is `done`, about every second: progress is heard,
    and deadlines pass, only while somebody asks or waits.

    refs: rank by Ray's reference of its answer.
    """

    def __init__(self, call: Call, members: Sequence[Actor], refs: Mapping[Any, int]) -> None:
        self.over = False
        """Whether `result` has given or raised what came of it."""
        self.error: WorkerError | None = None
        """What `result` has raised."""
        self._call, self._members, self._refs = call, members, dict(refs)
        self._watch = HealthWatch([member.handle for member in members])
        self._results: dict[int, Any] = {}
        self._errors: list[tuple[int, RayError]] = []  # with their ranks, in the order of their arrival
        self._failed_at = 0.0
        self._ended: Ended | None = None
        self._asking = threading.Lock()

    def __str__(self) -> str:
        """Return method and context."""
        return str(self._call)

    @property
    def timeout_s(self) -> float:
        """Return the deadline, in seconds without progress of any rank."""
        return self._call.timeout_s

    @property
    def progress(self) -> Mapping[int, Progress]:
        """Return what each rank said last, of those that have said anything; any thread may ask."""
        return dict(self._watch.progress)

    def done(self) -> bool:
        """Say whether `result` has no more to wait for: the ranks have answered, or the call has failed. Never waits.

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
        """Do as `result`, but no signal has to wait: for workers that nobody else has heard of yet."""
        with self._one_thread(), activity.at(self._at):
            if not self.over:
                self._finish()
            if self.error is not None:
                raise self.error
            return [answer for _, answer in sorted(self._results.items(), key=lambda item: item[0])]

    def _at(self) -> str:
        """Return the call, and what each rank that is waited for said last."""
        said = self.progress
        ranks = [
            f"{rank} at {said[rank].doing!r}" if rank in said else f"{rank} silent" for rank in self._waiting
        ]
        return f"{self}: {self._members[0].noun} {', '.join(ranks) or 'none'}"

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
            self._ended = self._ending(wait_s)
        return self._ended is not None

    def _finish(self) -> None:
        try:
            while not self._poll(_WAKE_EVERY_S):
                pass
            self.error = None if self._ended is Ended.ANSWERED else self._failure()
        except BaseException:  # a second Ctrl-C: nobody knows where the ranks are
            self.error = WorkerError(f"{self} was interrupted", self._call, code="interrupted")
            raise
        finally:
            self.over = True

    @property
    def _waiting(self) -> list[int]:
        """Return the ranks that have not answered."""
        return sorted(self._refs.values())

    def _ending(self, wait_s: float) -> Ended | None:
        """Take the answers that come within so many seconds; says why the call is over, None while it is not.

        After the first failure the other ranks have a grace to report theirs.
        """
        self._watch.tick()
        self._take(wait_s)
        if not self._refs:
            return Ended.FAILED if self._errors else Ended.ANSWERED
        if self._errors:
            return Ended.FAILED if time.monotonic() - self._failed_at >= self._grace_s else None
        if self._watch.due(min(LOOK_EVERY_S, self.timeout_s / 4)):
            if self._members[0].lost() is not None:
                return Ended.LOST
            if self._gone(self._waiting):  # Ray says so some seconds later
                return Ended.GONE
            self._watch.look(self._waiting)
            if self._watch.stalled(self._waiting, self.timeout_s):
                return Ended.STALLED
            # What hangs would never hear of the stop; what only takes long answers, and is waited for.
            if current_stop_signals().asked and self._watch.silent(self._waiting, _ANSWERS_WITHIN_S):
                return Ended.SILENT
        return None

    @property
    def _grace_s(self) -> float:
        died = any(not isinstance(error, RayTaskError) for _, error in self._errors)
        return _GRACE_AFTER_A_DEATH_S if died else _GRACE_S

    def _take(self, wait_s: float) -> None:
        """Take the answers that are there, if need be wait so long for one."""
        wanted = 1
        while self._refs and (ready := ray.wait(list(self._refs), num_returns=wanted, timeout=wait_s)[0]):
            for ref in ready:
                self._take_one(ref)
            wait_s, wanted = 0, len(self._refs)  # one by one it would cost the square of the ranks

    def _wait_at_most(self, seconds: float) -> None:
        """Take the answers that come within so many seconds, progress or not."""
        deadline = time.monotonic() + seconds
        while self._refs and (left := deadline - time.monotonic()) > 0:
            self._take(left)

    def _take_one(self, ref: Any) -> None:
        rank = self._refs[ref]
        self._watch.moved()
        try:
            self._results[rank] = ray.get(ref)
        except RayError as error:
            if not self._errors:
                self._failed_at = time.monotonic()
            self._errors.append((rank, error))
        del self._refs[ref]  # last: a Ctrl-C before it has the answer taken once more

    def _failure(self) -> WorkerError:
        """Return what went wrong; ranks that do not return are killed."""
        call, cluster = self._call, self._members[0].cluster
        failures = [self._members[rank].failure(error) for rank, error in self._errors]
        # Ranks that all answered, if only by raising, still serve: an open train step can be aborted.
        usable = not self._waiting and not any(failure.died for failure in failures)
        if not usable and (lost := self._members[0].lost()) is not None:
            return call.end_of_session(lost)
        failures = [
            replace(failure, lost_node=cluster.lost_node(failure.identity)) if failure.died else failure
            for failure in failures
        ]
        stalls = self._stalls()
        for rank in self._waiting:
            self._members[rank].end()
        # Else Ray logs the answers of the dead; that of one whose machine is gone takes it long.
        self._wait_at_most(_KILL_WAIT_S if stalls and _lost_node(stalls) is None else 0)
        if self._ended is Ended.GONE:
            failures = [failure for stall in stalls if (failure := stall.as_lost()) is not None]
            stalls = [stall for stall in stalls if stall.lost_node is None]
        noun = self._members[0].noun
        if self._ended in (Ended.STALLED, Ended.SILENT):
            stopping = self._ended is Ended.SILENT
            message = describe_stall(stalls, len(self._members), call, noun, stopping=stopping)
            return WorkerError(message, call, lost_node=_lost_node(stalls), code="no-progress")
        message = describe(failures, stalls, str(call), cluster.log_dir, noun)
        return WorkerError(message, call, root_cause(failures), usable=usable, lost_node=_lost_node(stalls))

    def _stalls(self) -> list[Stall]:
        """Return what is known of the ranks that have not answered; it is asked for before they are killed."""
        cluster = self._members[0].cluster
        gone = self._gone(self._waiting)
        stacks = self._stacks(gone) if self._waiting else {}
        return [
            Stall(
                (member := self._members[rank]).number,
                member.identity,
                doing=self._watch.doing(rank),
                stack=stacks.get(rank, ""),
                silent=None if rank in stacks else cluster.process_state(member.identity),
                lost_node=gone.get(rank),
            )
            for rank in self._waiting
        ]

    def _stacks(self, gone: Collection[int]) -> dict[int, str]:
        """Return where those that have not answered stand in their code, if they say so; those that are gone do not."""
        answering = [
            rank
            for rank in self._waiting
            if rank not in gone and not self._watch.silent([rank], _ANSWERS_WITHIN_S)
        ]
        asked = {self._members[rank].handle._health.remote(True): rank for rank in answering}
        ready, _ = (
            ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_WITHIN_S) if asked else ([], [])
        )
        stacks: dict[int, str] = {}
        for ref in ready:
            with suppress(RayError):
                stacks[asked[ref]] = ray.get(ref).stack
        return stacks

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return those whose machine is gone, and which it is."""
        identities = {rank: self._members[rank].identity for rank in ranks}
        asked = {rank: one.node_id for rank, one in identities.items() if one is not None}
        lost = self._members[0].cluster.lost_nodes({*asked.values()})
        return {rank: lost[node] for rank, node in asked.items() if node in lost}


def _lost_node(stalls: Iterable[Stall]) -> str | None:
    return next((stall.lost_node for stall in stalls if stall.lost_node is not None), None)
