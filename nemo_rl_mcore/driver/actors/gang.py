"""A gang of supervised actors, lost as a whole: the ranks of a policy, and one engine alone; and a call to it.

Ranks are called as a whole; of an engine on several machines the first actor alone.

Runs in the driver, in the thread that calls; `shutdown` may come from any other. There is no health thread: answers are
taken, progress is heard and deadlines pass while somebody waits for a `PendingCall`, in that thread alone. Nothing is
restarted here: `Policy.restart` makes another gang of ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_rl_mcore.driver.actors.actor import LOOK_EVERY_S, Actor, HealthWatch
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import (
    RankFailure,
    RankIdentity,
    Stall,
    WorkerCall,
    WorkerError,
    describe,
    describe_stall,
    root_cause,
)
from nemo_rl_mcore.driver.actors.places import Placement
from nemo_rl_mcore.driver.actors.supervised import Construction, actor_class, use_arrays_for_tensors
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.activity import Progress

# Python hears of signals between two waits, and of two signals that came during one it hears once.
_WAKE_EVERY_S = 0.2
_KILL_WAIT_S = 2.0
_GRACE_S = 5.0
_GRACE_AFTER_A_DEATH_S = 1.0  # what died is the cause, whatever the others report
_STACKS_WITHIN_S = 2.0
_ANSWERS_WITHIN_S = 3.0


class RayWorkerGroup(AbstractContextManager["RayWorkerGroup"]):
    """`world_size` actors of one class, each with the environment of its rank.

    A call reaches every rank, because the ranks meet in collectives; hence there is one at a time, from one thread. The
    first failure ends it: the others get a grace to report theirs, those that hang are killed, and one `WorkerError`
    names the root cause. If every rank answered, be it by raising, none waits in a collective, and the group can be
    called again, to abort a step for example; otherwise each later call raises the same failure. Deadlines are seconds
    without progress of `rank.activity`. A first Ctrl-C or SIGTERM waits until the call is over.

    worker_class: a plain class; it becomes an actor here. args, kwargs: of every constructor. share_class: of all
    workers but the first, where that one alone is called; it ends once `serve` of one of them returns or raises.
    start_timeout_s: for all constructors. call_timeout_s: of calls that do not give their own. deadline_keys: the
    section of a recipe that has these two keys, for messages. placement: left out, the cluster places one for each of
    its ranks. name: of the group, such as "policy", for messages and `WorkerError.group`. noun: of a worker, after the
    name. secrets: environment variables that constructors need and nobody else is to see. lost: says what has ended
    without which no worker can be reached, None while nothing has; left out, the cluster's.

    Raises WorkerError: a constructor failed, or not all finished in time.
    """

    def __init__(
        self,
        worker_class: type,
        cluster: RayCluster,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        start_timeout_s: float = 300,
        call_timeout_s: float = 600,
        deadline_keys: str = "",
        placement: Placement | None = None,
        name: str = "",
        noun: str = "rank",
        secrets: Mapping[str, str] | None = None,
        share_class: type | None = None,
        lost: Callable[[], str | None] | None = None,
    ) -> None:
        use_arrays_for_tensors()
        self.placement = placement or cluster.place_ranks()
        self.world_size = len(self.placement.slots)
        self.members: Sequence[Actor] = ()
        self._name, self._cluster = name, cluster
        self._call_timeout_s, self._deadline_keys = call_timeout_s, deadline_keys
        self._lost = lost or cluster.lost
        self._called: Sequence[Actor] = ()
        self._last: PendingCall | None = None
        self._starting = threading.Lock()
        self._shut = False
        try:
            first = actor_class(worker_class)
            others = first if share_class is None else actor_class(share_class)
            self.members = [
                Actor.begin(others if at else first, slot, f"{name} {noun}".strip(), cluster, self._lost)
                for at, slot in enumerate(self.placement.slots)
            ]
            construction = Construction(args, kwargs or {}, secrets=secrets or {})
            self._build(construction, f"{worker_class.__name__}()", start_timeout_s)
            self._called = self.members if share_class is None else self.members[:1]
            # Where a share ends, however that comes about, so does the first worker.
            self._serving = [one.handle.serve.remote().future() for one in self.members[len(self._called) :]]
            for serving in self._serving:
                # In a thread: in Ray's own, which tells of answers, no call of Ray's ever returns.
                serving.add_done_callback(
                    lambda _: threading.Thread(target=self._called[0].end, daemon=True).start()
                )
        except BaseException:
            self.shutdown(keep_places=placement is not None)  # they are for whoever has given them
            raise

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        return {rank: one.identity for rank, one in enumerate(self.members) if one.identity is not None}

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def call(
        self,
        method: str,
        *args: Any,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        answering: Collection[int] | None = None,
        timeout_s: float | None = None,
        key: str = "call_timeout_s",
        context: str = "",
        **kwargs: Any,
    ) -> PendingCall:
        """Begin a call of `method` on every rank, with arguments common to all and, by keyword, each rank's own.

        answering: the ranks whose answers are wanted, None is all; the others run the method. timeout_s: None is the
        group's. key: of that deadline in the recipe. context: what the call is for, such as "step 12", for messages.

        Raises GroupInUseError where the result of the call before has not been taken, WorkerError where the group
        cannot be called any more.
        """
        if per_rank_kwargs and len(per_rank_kwargs) != self.world_size:
            raise RefusedError(
                f"{method}: per_rank_kwargs has {len(per_rank_kwargs)} entries for {self.world_size} ranks",
                code="entries-per-rank",
            )
        deadline = f"{self._deadline_keys}.{key}" if self._deadline_keys and key else ""
        call = WorkerCall(method, context, timeout_s or self._call_timeout_s, deadline, self._name)
        with self._starting, deferred_stop_signals():
            last = self._last
            if self._shut:
                raise call.not_started("the worker group is shut down", "shut-down")
            if last is not None and not last.over:
                raise GroupInUseError(
                    f"{call} was not started: {self._name or 'the worker group'} is at {last}, whose result has not "
                    "been taken; one thread at a time makes one call at a time"
                )
            if last is not None and last.error is not None and not last.error.usable:
                why = f"the worker group ended with an earlier failure: {last.error}"
                raise call.not_started(why, "ended-before", final=last.error.final)
            if (lost := self._lost()) is not None:
                raise call.end_of_session(lost)
            refs: dict[Any, int] = {}
            for rank, member in enumerate(self._called):
                actor, answers = member.handle, answering is None or rank in answering
                run = getattr(actor, method).remote if answers else partial(actor._only_run.remote, method)
                own = per_rank_kwargs[rank] if per_rank_kwargs else {}
                refs[run(*args, **kwargs, **own)] = rank
            self._last = PendingCall(call, self._called, refs)
            return self._last

    def run_all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        with deferred_stop_signals():
            return self.call(method, *args, **options).interruptible_result()

    def shutdown(self, *, keep_places: bool = False) -> None:
        """Kill every rank and give its resources back; idempotent. A call that is pending fails.

        keep_places: the placement is not given back: another group is started in it.
        """
        self._shut = True  # first: a thread that waits soon sees them die
        for member in self.members:
            member.end()
        if self._cluster.lost() is None and not keep_places:
            self.placement.release()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _build(self, construction: Construction, name: str, timeout_s: float) -> None:
        """Run the constructors: once all processes are there, and rank 0 has a port where they can meet."""
        call = WorkerCall(name, "start of the workers", timeout_s, group=self._name)
        members, actors = self.members, [member.handle for member in self.members]

        def answers(refs: Mapping[Any, int]) -> list[Any]:
            return PendingCall(call, members, refs).interruptible_result()

        identities = answers({actor._identify.remote(): rank for rank, actor in enumerate(actors)})
        for member, identity in zip(members, identities, strict=True):
            member.identity = identity
        address = self.placement.slots[0].environment.get("MASTER_ADDR")
        if address is not None:
            [port] = answers({actors[0]._listen.remote(address): 0})
            construction = replace(construction, environment={"MASTER_PORT": str(port)})
        shared = ray.put(construction)
        answers({actor._build.remote(shared): rank for rank, actor in enumerate(actors)})


class CallEnd(Enum):
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

    It is pending until `result` has given or raised what came of it (`over`, `error`), and the group takes no other
    call before. Progress is heard, and deadlines pass, only while somebody asks or waits. refs: rank by Ray's reference
    of its answer.
    """

    def __init__(self, call: WorkerCall, members: Sequence[Actor], refs: Mapping[Any, int]) -> None:
        self.over = False
        self.error: WorkerError | None = None
        self.timeout_s = call.timeout_s
        self._call, self._members, self._refs = call, members, dict(refs)
        self._watch = HealthWatch([member.handle for member in members])
        self._results: dict[int, Any] = {}
        self._errors: list[tuple[int, RayError]] = []  # with their ranks, in the order of their arrival
        self._failed_at = 0.0
        self._ended: CallEnd | None = None
        self._asking = threading.Lock()

    def __str__(self) -> str:
        return str(self._call)

    @property
    def progress(self) -> Mapping[int, Progress]:
        return dict(self._watch.progress)

    def done(self) -> bool:
        """Say, without a wait, whether the ranks have answered or the call has failed; GroupInUseError as `result`."""
        with self._one_thread():
            return self._look(0)

    def result(self) -> list[Any]:
        """Wait for the answers, in the order of the ranks; a first Ctrl-C or SIGTERM waits until the call is over.

        Raises WorkerError: see `RayWorkerGroup`. GroupInUseError when another thread asks, too.
        """
        with deferred_stop_signals():
            return self.interruptible_result()

    def interruptible_result(self) -> list[Any]:
        """Do as `result`, but no signal has to wait: for workers that nobody else has heard of yet."""

        def doing() -> str:
            said = self.progress
            ranks = [
                f"{rank} at {said[rank].doing!r}" if rank in said else f"{rank} silent"
                for rank in self._waiting
            ]
            return f"{self}: {self._members[0].noun} {', '.join(ranks) or 'none'}"

        with self._one_thread(), activity.at(doing):
            try:
                while not self.over and not self._look(_WAKE_EVERY_S):
                    pass
                if not self.over:
                    self.error = None if self._ended is CallEnd.ANSWERED else self._failure()
            except BaseException:  # a second Ctrl-C: nobody knows where the ranks are
                self.error = WorkerError(f"{self} was interrupted", self._call, code="interrupted")
                raise
            finally:
                self.over = True
            if self.error is not None:
                raise self.error
            return [answer for _, answer in sorted(self._results.items(), key=lambda item: item[0])]

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._asking.acquire(blocking=False):
            raise GroupInUseError(f"{self}: another thread asks for its result; one at a time")
        try:
            yield
        finally:
            self._asking.release()

    @property
    def _waiting(self) -> list[int]:
        return sorted(self._refs.values())

    def _look(self, wait_s: float) -> bool:
        """Take the answers that come within so many seconds, and say whether the call is over.

        After the first failure the other ranks have a grace to report theirs.
        """
        if self._ended is not None:
            return True
        self._watch.tick()
        self._take(wait_s)
        if not self._refs:
            self._ended = CallEnd.FAILED if self._errors else CallEnd.ANSWERED
        elif self._errors:
            died = any(not isinstance(error, RayTaskError) for _, error in self._errors)
            if time.monotonic() - self._failed_at >= (_GRACE_AFTER_A_DEATH_S if died else _GRACE_S):
                self._ended = CallEnd.FAILED
        elif self._watch.due(min(LOOK_EVERY_S, self.timeout_s / 4)):
            if self._members[0].lost() is not None:
                self._ended = CallEnd.LOST
            elif self._gone(self._waiting):  # Ray says so some seconds later
                self._ended = CallEnd.GONE
            else:
                self._watch.look(self._waiting)
                if self._watch.stalled(self._waiting, self.timeout_s):
                    self._ended = CallEnd.STALLED
                # What hangs would never hear of the stop; what only takes long answers, and is waited for.
                elif current_stop_signals().asked and self._watch.silent(self._waiting, _ANSWERS_WITHIN_S):
                    self._ended = CallEnd.SILENT
        return self._ended is not None

    def _take(self, wait_s: float) -> None:
        wanted = 1
        while self._refs and (ready := ray.wait(list(self._refs), num_returns=wanted, timeout=wait_s)[0]):
            for ref in ready:
                rank = self._refs[ref]
                self._watch.moved()
                try:
                    self._results[rank] = ray.get(ref)
                except RayError as error:
                    if not self._errors:
                        self._failed_at = time.monotonic()
                    self._errors.append((rank, error))
                del self._refs[ref]  # last: a Ctrl-C before it has the answer taken once more
            wait_s, wanted = 0, len(self._refs)  # one by one it would cost the square of the ranks

    def _failure(self) -> WorkerError:
        call, cluster, noun = self._call, self._members[0].cluster, self._members[0].noun
        failures = [self._members[rank].failure(error) for rank, error in self._errors]
        # Ranks that all answered, if only by raising, still serve: an open train step can be aborted.
        usable = not self._waiting and not any(failure.died for failure in failures)
        if not usable and (lost := self._members[0].lost()) is not None:
            return call.end_of_session(lost)
        lost_nodes = cluster.lost_nodes({failure.identity.node_id for failure in failures if failure.died})
        failures = [
            replace(one, lost_node=lost_nodes.get(one.identity.node_id)) if one.died else one
            for one in failures
        ]
        stalls = self._stalls()
        lost_node = next((stall.lost_node for stall in stalls if stall.lost_node is not None), None)
        for rank in self._waiting:
            self._members[rank].end()
        if stalls and lost_node is None:
            # Else Ray logs the answers of the dead; that of one whose machine is gone takes it long.
            deadline = time.monotonic() + _KILL_WAIT_S
            while self._refs and (left := deadline - time.monotonic()) > 0:
                self._take(left)
        if self._ended in (CallEnd.STALLED, CallEnd.SILENT):
            stopping = self._ended is CallEnd.SILENT
            message = describe_stall(stalls, len(self._members), call, noun, stopping=stopping)
            return WorkerError(message, call, lost_node=lost_node, code="no-progress")
        if self._ended is CallEnd.GONE:
            report = "the Ray server of its machine does not listen any more"
            failures = [
                RankFailure(stall.rank, stall.identity, report, lost_node=stall.lost_node)
                for stall in stalls
                if stall.lost_node is not None and stall.identity is not None
            ]
            stalls, lost_node = [stall for stall in stalls if stall.lost_node is None], None
        message = describe(failures, stalls, str(call), cluster.log_dir, noun)
        return WorkerError(message, call, root_cause(failures), usable=usable, lost_node=lost_node)

    def _stalls(self) -> list[Stall]:
        """Describe the ranks that have not answered, before they are killed.

        Those whose machines are there say where they stand in their code, if they say anything.
        """
        cluster, gone = self._members[0].cluster, self._gone(self._waiting)
        asked = {
            self._members[rank].handle._health.remote(True): rank
            for rank in self._waiting
            if rank not in gone and not self._watch.silent([rank], _ANSWERS_WITHIN_S)
        }
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_WITHIN_S)[0] if asked else []
        stacks: dict[int, str] = {}
        for ref in ready:
            with suppress(RayError):
                stacks[asked[ref]] = ray.get(ref).stack
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

    def _gone(self, ranks: Iterable[int]) -> dict[int, str]:
        identities = {rank: self._members[rank].identity for rank in ranks}
        asked = {rank: one.node_id for rank, one in identities.items() if one is not None}
        lost = self._members[0].cluster.lost_nodes({*asked.values()})
        return {rank: lost[node] for rank, node in asked.items() if node in lost}
