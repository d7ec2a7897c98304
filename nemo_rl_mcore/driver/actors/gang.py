"""A gang of supervised actors, lost as a whole: the ranks of a policy, and one engine alone.

Ranks are called as a whole; of an engine on several machines the first actor alone.

Runs in the driver, in the thread that calls; `shutdown` may come from any other. There is no health thread: progress is
heard while somebody waits (`gang_call.py`). Nothing is restarted here: `Policy.restart` makes another gang of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import ray

from nemo_rl_mcore.driver.actors.actor import Actor, Construction, actor_class
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.failures import Call, RankIdentity, WorkerError
from nemo_rl_mcore.driver.actors.gang_call import GroupInUseError, PendingCall
from nemo_rl_mcore.driver.actors.placement import Placement
from nemo_rl_mcore.driver.actors.tensor_transport import use_arrays_for_tensors
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import RefusedError

_MASTER_ADDRESS, _MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"


class WorkerGroup(Protocol):
    """Answers what `Policy` asks of its ranks; see `RayWorkerGroup`, and `InProcessRank` for a single one."""

    @property
    def placement(self) -> Placement:
        """Return where the ranks run."""
        ...

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        """Return the host and process of each rank."""
        ...

    def share(self, value: Any) -> Any:
        """Return what to give a call in place of a large value that several ranks get."""
        ...

    def run_all(
        self,
        method: str,
        *,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        answering: Collection[int] | None = None,
        context: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method on every rank, with arguments common to all and each rank's own; see `RayWorkerGroup.call`."""
        ...

    def shutdown(self, *, keep_places: bool = False) -> None:
        """End every rank; keep_places: for others, which take over the placement."""
        ...


class RayWorkerGroup:
    """`world_size` actors of one class, each with the environment of its rank.

    A call reaches every rank, because the ranks meet in collectives. For the same reason it is one at a time, from one
    thread: two at once would be right only if they came to every rank in one order.

    The first failure ends a call: the others get a grace to report theirs, those that hang are killed, and one
    `WorkerError` names the root cause. If every rank answered, be it by raising, none waits in a collective, and the
    group can be called again, to abort a step for example; otherwise each later call raises the same failure.

    Deadlines are seconds without progress: of `rank.activity`, whose counter each rank reports while it works.
    A first Ctrl-C or SIGTERM waits until the call is over.

    Args:
        worker_class: a plain class; it becomes an actor here and nowhere else.
        share_class: of all workers but the first, where that one alone is called. The others live with it: it is ended
            once `serve` of one of them returns or raises.
        cluster: the session that places the ranks.
        args: positional arguments of every worker's constructor.
        kwargs: keyword arguments of every worker's constructor.
        start_timeout_s: deadline for all constructors.
        call_timeout_s: deadline of calls that do not give their own.
        deadline_keys: the section of a recipe that has these two keys, for messages.
        placement: where the workers run; left out, the cluster places one for each of its ranks.
        name: of the group, such as "policy", for messages and `WorkerError.group`.
        noun: what messages call a worker, after the name.
        secrets: environment variables that constructors need and nobody else is to see.
        lost: says what has ended without which no worker can be reached, None while nothing has; left out, it is the
            cluster's.

    Raises:
        WorkerError: a constructor failed, or not all finished in time.

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
        self._name = name
        self._cluster = cluster
        self._call_timeout_s = call_timeout_s
        self._deadline_keys = deadline_keys
        self._last: PendingCall | None = None
        self._starting = threading.Lock()
        use_arrays_for_tensors()
        self._placement = placement or cluster.place_ranks()
        self._lost, noun = lost or cluster.lost, f"{name} {noun}".strip()
        self._members: Sequence[Actor] = ()
        self._called: Sequence[Actor] = ()
        self._shut = False
        try:
            first = actor_class(worker_class)
            others = first if share_class is None else actor_class(share_class)
            self._members = [
                Actor.begin(others if at else first, slot, noun, cluster, self._lost)
                for at, slot in enumerate(self._placement.slots)
            ]
            construction = Construction(args, kwargs or {}, secrets=secrets or {})
            self._build(construction, f"{worker_class.__name__}()", start_timeout_s)
            self._called = self._members if share_class is None else self._members[:1]
            self._serving = [self._end_with(one) for one in self._members if one not in self._called]
        except BaseException:
            self.shutdown(keep_places=placement is not None)  # they are for whoever has given them
            raise

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self._placement.slots)

    @property
    def members(self) -> Sequence[Actor]:
        """Return the actor of each rank."""
        return tuple(self._members)

    @property
    def placement(self) -> Placement:
        """Return where the ranks run."""
        return self._placement

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        """Return the host and process of each rank."""
        return {rank: one.identity for rank, one in enumerate(self._members) if one.identity is not None}

    def share(self, value: Any) -> Any:
        """Put a value into the object store once, for the calls of several ranks."""
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

        answering: the ranks whose answers are wanted; None is all. The others run the method, and give None.
        timeout_s: the deadline; None is the group's. key: of the deadline, in the section of a recipe that the group
        knows. context: what the call is for, such as "step 12", for messages.

        Raises:
            GroupInUseError: the result of the call before has not been taken.
            WorkerError: the group cannot be called any more.

        """
        if per_rank_kwargs and len(per_rank_kwargs) != self.world_size:
            raise RefusedError(
                f"{method}: per_rank_kwargs has {len(per_rank_kwargs)} entries for {self.world_size} ranks",
                code="entries-per-rank",
            )
        call = Call(method, context, timeout_s or self._call_timeout_s, self._key(key), self._name)
        own = per_rank_kwargs or [{}] * self.world_size
        with self._starting, deferred_stop_signals():
            self._refuse(call)
            refs: dict[Any, int] = {}
            for rank, member in enumerate(self._called):
                actor, answers = member.handle, answering is None or rank in answering
                run = getattr(actor, method).remote if answers else partial(actor._only_run.remote, method)
                refs[run(*args, **kwargs, **own[rank])] = rank
            self._last = PendingCall(call, self._called, refs)
            return self._last

    def run_all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """Return the result of `call`, in the order of the ranks.

        Raises:
            WorkerError: see the class; also after `timeout_s` without progress, naming the ranks that did not return.

        """
        with deferred_stop_signals():
            return self.call(method, *args, **options).result()

    def shutdown(self, *, keep_places: bool = False) -> None:
        """Kill every rank and give its resources back; idempotent. A call that is pending fails.

        keep_places: the placement is not given back: another group is started in it.
        """
        self._shut = True  # first: a thread that waits soon sees them die
        for member in self._members:
            member.end()
        if self._cluster.lost() is None and not keep_places:
            self._placement.release()

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _build(self, construction: Construction, name: str, timeout_s: float) -> None:
        """Run the constructors: once all processes are there, and rank 0 has a port where they can meet."""
        call = Call(name, "start of the workers", timeout_s, self._key("start_timeout_s"), self._name)
        members, actors = self._members, [member.handle for member in self._members]

        def answers(refs: Mapping[Any, int]) -> list[Any]:
            return PendingCall(call, members, refs).interruptible_result()

        identities = answers({actor._identify.remote(): rank for rank, actor in enumerate(actors)})
        for member, identity in zip(members, identities, strict=True):
            member.identity = identity
        address = self._placement.slots[0].environment.get(_MASTER_ADDRESS)
        if address is not None:
            [port] = answers({actors[0]._listen.remote(address): 0})
            construction = replace(construction, environment={_MASTER_PORT: str(port)})
        shared = ray.put(construction)
        answers({actor._build.remote(shared): rank for rank, actor in enumerate(actors)})

    def _end_with(self, share: Actor) -> Future[None]:
        """Have the first worker end once a share does, however that comes about."""
        [first] = self._called
        serving: Future[None] = share.handle.serve.remote().future()
        # In a thread: in Ray's own, which tells of answers, no call of Ray's ever returns.
        serving.add_done_callback(lambda _: threading.Thread(target=first.end, daemon=True).start())
        return serving

    def _key(self, name: str) -> str:
        return f"{self._deadline_keys}.{name}" if self._deadline_keys and name else ""

    def _refuse(self, call: Call) -> None:
        """Raise what keeps the group from being called, if anything does."""
        if self._shut:
            raise WorkerError(
                f"{call} was not started: the worker group is shut down", call, code="shut-down"
            )
        if self._last is not None and not self._last.over:
            raise GroupInUseError(
                f"{call} was not started: {self._name or 'the worker group'} is at {self._last}, whose result has not "
                "been taken; one thread at a time makes one call at a time"
            )
        if self._last is not None and self._last.error is not None and not self._last.error.usable:
            headline, _, details = str(self._last.error).partition("\n")
            raise WorkerError(
                f"{call} was not started: the worker group ended with an earlier failure: {headline}\n{details}",
                call,
                final=self._last.error.final,
                code="ended-before",
            )
        if (lost := self._lost()) is not None:
            raise call.end_of_session(lost)
