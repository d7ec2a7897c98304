"""A gang of supervised actors (a policy's ranks, or one engine) that is lost as a whole, and calls to it.

Ranks are called together; for an engine on several machines, only the first actor is called. Everything runs in the
driver's calling thread, except that any thread may call `shutdown`. Answers are received, progress is read and
deadlines pass only while that thread waits for a `PendingCall`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_rl_mcore.driver import activity
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

# Python handles signals between two waits, and two equal signals during one wait are handled as one.
_WAKE_EVERY_S = 0.2
_KILL_WAIT_S = 2.0
_GRACE_S = 5.0
_GRACE_AFTER_A_DEATH_S = 1.0  # a death is the cause, whatever the others report
_STACKS_WITHIN_S = 2.0
_ANSWERS_WITHIN_S = 3.0


class RayWorkerGroup(AbstractContextManager["RayWorkerGroup"]):
    """`world_size` actors of one class, each with its rank's environment.

    Every call goes to all ranks, which meet in collectives; so only one call runs at a time, from one thread. The first
    failure ends the call: other ranks get a grace period to report their errors, hung ranks are killed, and one
    `WorkerError` names the root cause. If every rank answered or raised, none waits in a collective, and the group can
    be called again, for example to abort a step; otherwise each later call raises the same error. Deadlines are seconds
    without progress of `rank.activity`. A first Ctrl-C or SIGTERM waits for the call's end.

    worker_class: a plain class, which is made an actor here. args, kwargs: every constructor's arguments. share_class:
    the class of all workers except the first, if only the first is called; the first worker ends when another's `serve`
    returns or raises. start_timeout_s: deadline for all constructors. call_timeout_s: the calls' default deadline.
    deadline_keys: the recipe section with these two keys, for messages. placement: by default, one worker for each of
    the cluster's ranks. name: the group's name, such as "policy", for messages and `WorkerError.group`. noun: the word
    for a worker, after the name. secrets: environment variables for the constructors only. lost: returns the reason why
    workers are unreachable, or None; by default the cluster's. Raises WorkerError if a constructor fails or is late.
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
        start = WorkerCall(f"{worker_class.__name__}()", "start of the workers", start_timeout_s, group=name)
        try:
            first = actor_class(worker_class)
            others = first if share_class is None else actor_class(share_class)
            self.members = [
                Actor.begin(others if at else first, slot, f"{name} {noun}".strip(), cluster, self._lost)
                for at, slot in enumerate(self.placement.slots)
            ]
            self._build(start, Construction(args, kwargs or {}, secrets=secrets or {}))
            self._called = self.members if share_class is None else self.members[:1]
            # The first worker ends with any share, whatever the reason.
            self._serving = [one.handle.serve.remote().future() for one in self.members[len(self._called) :]]
            for serving in self._serving:
                # Use another thread: calls to Ray block forever in Ray's own thread, which runs callbacks.
                serving.add_done_callback(
                    lambda _: threading.Thread(target=self._called[0].end, daemon=True).start()
                )
        except BaseException:
            self.shutdown(keep_places=placement is not None)  # the caller owns a given placement
            raise

    def _build(self, start: WorkerCall, construction: Construction) -> None:
        """Run the constructors once all processes exist and rank 0 has a rendezvous port."""

        def answers(refs: Mapping[Any, int]) -> list[Any]:
            return PendingCall(start, self.members, refs).result(interruptible=True)

        actors = [member.handle for member in self.members]
        identities = answers({actor._identify.remote(): rank for rank, actor in enumerate(actors)})
        for member, identity in zip(self.members, identities, strict=True):
            member.identity = identity
        if (address := self.placement.slots[0].environment.get("MASTER_ADDR")) is not None:
            [port] = answers({actors[0]._listen.remote(address): 0})
            construction = replace(construction, environment={"MASTER_PORT": str(port)})
        shared = ray.put(construction)
        answers({actor._build.remote(shared): rank for rank, actor in enumerate(actors)})

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
        """Begin a call of `method` on every rank, with common arguments and per-rank keyword arguments.

        answering: the ranks whose answers are returned, None for all; the others only run the method. timeout_s: by
        default, the group's timeout. key: the timeout's recipe key. context: the call's purpose, such as "step 12", for
        messages. Raises GroupInUseError if an earlier call's result is still pending, WorkerError if the group can no
        longer be called.
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
                    f"{call} was not started: {self._name or 'the worker group'} is at {last.call}, whose result has "
                    "not been taken; one thread at a time makes one call at a time"
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
            return self.call(method, *args, **options).result()

    def shutdown(self, *, keep_places: bool = False) -> None:
        """Kill all ranks and free their resources; idempotent. A pending call fails.

        keep_places: True to keep the placement for another group.
        """
        self._shut = True  # set first: a waiting thread soon sees the ranks die
        for member in self.members:
            member.end()
        if self._cluster.lost() is None and not keep_places:
            self.placement.release()

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class GroupInUseError(RuntimeError):
    """A group was called while a call to it was pending."""


class PendingCall:
    """A call begun by `RayWorkerGroup.call`; one thread waits for it.

    The call is pending until `result` returns or raises (`over`, `error`); until then the group accepts no other call.
    Progress is read, and deadlines pass, only during `look` and `result`. refs: the answers' references, with ranks.
    """

    def __init__(self, call: WorkerCall, members: Sequence[Actor], refs: Mapping[Any, int]) -> None:
        self.over = False
        self.error: WorkerError | None = None
        self.timeout_s = call.timeout_s
        self.watch = HealthWatch([member.handle for member in members])
        self.call = call
        self._members = members
        self._refs = dict(refs)
        self._results: dict[int, Any] = {}
        self._errors: list[tuple[int, RayError]] = []  # with their ranks, in order of arrival
        self._failed_at = 0.0
        # silent: a rank does not answer during a stop; lost: Ray died; gone: a rank's machine is lost.
        self._ended: Literal["", "answered", "failed", "stalled", "silent", "lost", "gone"] = ""

    def result(self, *, interruptible: bool = False) -> list[Any]:
        """Return the answers in rank order, or raise WorkerError; see `RayWorkerGroup`.

        A first Ctrl-C or SIGTERM waits for the call's end, unless the call is interruptible, as at the workers' start.
        """

        def doing() -> str:
            progress = dict(self.watch.progress)
            ranks: list[str] = []
            for rank in self._waiting:
                at = f"at {progress[rank].doing!r}" if rank in progress else "silent"
                ranks.append(f"{rank} {at}")
            noun = self._members[0].noun
            return f"{self.call}: {noun} {', '.join(ranks) or 'none'}"

        with nullcontext() if interruptible else deferred_stop_signals(), activity.at(doing):
            try:
                while not self.over and not self.look(_WAKE_EVERY_S):
                    pass
                if not self.over:
                    self.error = None if self._ended == "answered" else self._failure()
            except BaseException:  # a second Ctrl-C leaves the ranks in an unknown state
                self.error = WorkerError(f"{self.call} was interrupted", self.call, code="interrupted")
                raise
            finally:
                self.over = True
            if self.error is not None:
                raise self.error
            return [answer for _, answer in sorted(self._results.items(), key=lambda item: item[0])]

    @property
    def _waiting(self) -> list[int]:
        return sorted(self._refs.values())

    def look(self, wait_s: float = 0) -> bool:
        """Collect answers that arrive within this many seconds, and return True if the call is over.

        After the first failure, the other ranks have a grace period to report their errors.
        """
        if self._ended:
            return True
        self._take(wait_s)
        if not self._refs:
            self._ended = "failed" if self._errors else "answered"
        elif self._errors:
            died = any(not isinstance(error, RayTaskError) for _, error in self._errors)
            if time.monotonic() - self._failed_at >= (_GRACE_AFTER_A_DEATH_S if died else _GRACE_S):
                self._ended = "failed"
        elif self.watch.due(min(LOOK_EVERY_S, self.timeout_s / 4)):
            if self._members[0].lost() is not None:
                self._ended = "lost"
            elif self._gone(self._waiting):  # Ray reports a lost machine some seconds later
                self._ended = "gone"
            else:
                self.watch.look(self._waiting)
                if self.watch.stalled(self._waiting, self.timeout_s):
                    self._ended = "stalled"
                # A hung rank would block the stop forever; a rank that is only slow still answers health checks.
                elif current_stop_signals().arrived and self.watch.silent(self._waiting, _ANSWERS_WITHIN_S):
                    self._ended = "silent"
        return bool(self._ended)

    def _take(self, wait_s: float) -> None:
        wanted = 1
        while self._refs and (ready := ray.wait(list(self._refs), num_returns=wanted, timeout=wait_s)[0]):
            for ref in ready:
                rank = self._refs[ref]
                self.watch.moved()
                try:
                    self._results[rank] = ray.get(ref)
                except RayError as error:
                    if not self._errors:
                        self._failed_at = time.monotonic()
                    self._errors.append((rank, error))
                del self._refs[ref]  # last, so that after a Ctrl-C the answer is collected again
            wait_s, wanted = 0, len(self._refs)  # waiting for each in turn would be quadratic in the ranks

    def _failure(self) -> WorkerError:
        call, cluster, noun = self.call, self._members[0].cluster, self._members[0].noun
        failures = [self._members[rank].failure(error) for rank, error in self._errors]
        # If all ranks answered, even by raising, the group remains usable: an open train step can be aborted.
        usable = not self._refs and not any(failure.died for failure in failures)
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
            # Otherwise Ray logs dead ranks' answers, which takes long with a lost machine.
            deadline = time.monotonic() + _KILL_WAIT_S
            while self._refs and (left := deadline - time.monotonic()) > 0:
                self._take(left)
        if self._ended in ("stalled", "silent"):
            stopping = self._ended == "silent"
            message = describe_stall(stalls, len(self._members), call, noun, stopping=stopping)
            return WorkerError(message, call, lost_node=lost_node, code="no-progress")
        if self._ended == "gone":
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
        """Describe the ranks that have not answered, with the stacks of those that still answer health checks."""
        cluster, gone = self._members[0].cluster, self._gone(self._waiting)
        asked = {
            self._members[rank].handle._health.remote(True): rank
            for rank in self._waiting
            if rank not in gone and not self.watch.silent([rank], _ANSWERS_WITHIN_S)
        }
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_WITHIN_S)[0] if asked else []
        stacks: dict[int, str] = {}
        for ref in ready:
            with suppress(RayError):
                _, stacks[asked[ref]] = ray.get(ref)
        return [
            Stall(
                (member := self._members[rank]).number,
                member.identity,
                doing=self.watch.doing(rank),
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
