"""A group of Ray actors, one per rank, that is called as a whole and fails as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import ray
from ray.exceptions import RayError

from nemo_rl_mcore.workers.cluster import Placement, RankSlot, RayCluster
from nemo_rl_mcore.workers.failures import (
    RankFailure,
    RankIdentity,
    WorkerError,
    describe,
    identity_in,
    root_cause,
)
from nemo_rl_mcore.workers.tensor_transport import use_arrays_for_tensors

_GRACE_S = 5.0
_KILL_WAIT_S = 2.0


class WorkerGroup(Protocol):
    """What `Policy` asks of its ranks; see `RayWorkerGroup`, which is the one that runs."""

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        ...

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        """Host and process of each rank."""
        ...

    def share(self, value: Any) -> Any:
        """What to give a call in place of a large value that several ranks get."""
        ...

    def run_all(self, method: str, *, context: str = "", **kwargs: Any) -> list[Any]:
        """Call a method on every rank with the same arguments."""
        ...

    def run_each(
        self, method: str, *, per_rank_kwargs: Sequence[Mapping[str, Any]], context: str = "", **kwargs: Any
    ) -> list[Any]:
        """Call a method with each rank's own arguments."""
        ...

    def shutdown(self) -> None:
        """End every rank."""
        ...


class RayWorkerGroup:
    """`world_size` actors of one class, each with the environment of its rank.

    A call reaches every rank, because the ranks meet in collectives. The first failure ends it: the others get
    a grace to report theirs, those that hang are killed, and one `WorkerError` tells the root cause. If every
    rank answered, be it by raising, none waits in a collective, and the group can be called again, to abort a
    step for example; otherwise each later call raises the same failure.

    Args:
        worker_class: a plain class; `ray.remote` wraps it here and nowhere else.
        cluster: the session that places the ranks.
        args: positional arguments of every worker's constructor.
        kwargs: keyword arguments of every worker's constructor.
        start_timeout_s: deadline for all constructors.
        call_timeout_s: deadline of calls that do not give their own.
        placement: where the workers run; left out, the cluster places one for each of its ranks.
        noun: what messages call a worker.

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
        placement: Placement | None = None,
        noun: str = "rank",
    ) -> None:
        self._noun = noun
        self._log_dir = cluster.log_dir
        self._call_timeout_s = call_timeout_s
        self._failure: WorkerError | None = None
        self._identities: dict[int, RankIdentity] = {}
        self._actors: list[Any] = []
        use_arrays_for_tensors()
        self._placement = placement or cluster.place_ranks()
        try:
            remote_class = ray.remote(worker_class)
            for slot in self._placement.slots:
                self._actors.append(_start(remote_class, slot, args, kwargs or {}))
            self._wait_until_built(worker_class.__name__, start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._placement.slots)

    @property
    def actors(self) -> Sequence[Any]:
        """Ray's handle of each rank, for other actors to call."""
        return tuple(self._actors)

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return self._placement

    @property
    def failure(self) -> WorkerError | None:
        """What ended the group; None while it can be called."""
        return self._failure

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        """Host and process of each rank."""
        return self._identities

    def share(self, value: Any) -> Any:
        """Put a value into the object store once, for the calls of several ranks."""
        return ray.put(value)

    def run_all(
        self, method: str, *args: Any, timeout_s: float | None = None, context: str = "", **kwargs: Any
    ) -> list[Any]:
        """Call `method` on every rank with the same arguments; results in the order of the ranks.

        Raises:
            WorkerError: see the class; also when `timeout_s` passes, naming the ranks that did not return.

        """
        self._refuse_after_failure(method, context)
        refs = {
            getattr(actor, method).remote(*args, **kwargs): rank for rank, actor in enumerate(self._actors)
        }
        return self._collect(refs, method, context, timeout_s or self._call_timeout_s)

    def run_each(
        self,
        method: str,
        per_rank_args: Sequence[Sequence[Any]] = (),
        *,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        timeout_s: float | None = None,
        context: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        """Call `method` with each rank's own arguments, and `kwargs` common to all; see `run_all`."""
        for name, given in (("per_rank_args", per_rank_args), ("per_rank_kwargs", per_rank_kwargs)):
            if given and len(given) != self.world_size:
                raise ValueError(f"{method}: {name} has {len(given)} entries for {self.world_size} ranks")
        self._refuse_after_failure(method, context)
        positional = per_rank_args or [()] * self.world_size
        keyword = per_rank_kwargs or [{}] * self.world_size
        refs = {
            getattr(actor, method).remote(*positional[rank], **{**kwargs, **keyword[rank]}): rank
            for rank, actor in enumerate(self._actors)
        }
        return self._collect(refs, method, context, timeout_s or self._call_timeout_s)

    def shutdown(self) -> None:
        """Kill every rank and give its resources back; idempotent."""
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._placement.release()

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _wait_until_built(self, class_name: str, timeout_s: float) -> None:
        refs = {actor.__ray_call__.remote(_identify): rank for rank, actor in enumerate(self._actors)}
        identities = self._collect(refs, f"{class_name}()", "start of the workers", timeout_s)
        self._identities = dict(enumerate(identities))

    def _refuse_after_failure(self, method: str, context: str) -> None:
        if self._failure is not None:
            raise WorkerError(
                f"{_where(method, context)} was not started: the worker group ended with an earlier failure\n"
                f"{self._failure}",
                None,
                method,
                context,
            )
        if not self._actors:
            raise WorkerError(
                f"{_where(method, context)} was not started: the worker group is shut down",
                None,
                method,
                context,
            )

    def _collect(self, refs: dict[Any, int], method: str, context: str, timeout_s: float) -> list[Any]:
        results, failures = self._wait(dict(refs), timeout_s, stop_at_failure=True)
        if not failures and len(results) == len(refs):
            return [results[rank] for rank in range(len(refs))]
        if failures:
            waiting = {ref: rank for ref, rank in refs.items() if rank not in _ranks(results, failures)}
            more_results, more_failures = self._wait(waiting, _GRACE_S, stop_at_failure=False)
            results |= more_results
            failures += more_failures
        hung = {ref: rank for ref, rank in refs.items() if rank not in _ranks(results, failures)}
        self._kill(hung)
        where = _where(method, context)
        if not failures:
            error = self._deadline_error(sorted(hung.values()), method, context, timeout_s)
        else:
            message = describe(failures, sorted(hung.values()), where, self._log_dir, self._noun)
            error = WorkerError(message, root_cause(failures), method, context)
        # Ranks that all answered, if only by raising, still serve: an open train step can be aborted.
        gone = hung or any(failure.died for failure in failures)
        self._failure = error if gone else None
        raise error

    def _wait(
        self, waiting: dict[Any, int], timeout_s: float, *, stop_at_failure: bool
    ) -> tuple[dict[int, Any], list[RankFailure]]:
        """Wait for answers until all are there, the time is over or, if asked, a rank failed."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        while waiting and not (failures and stop_at_failure):
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    results[rank] = ray.get(ref)
                except RayError as error:
                    identity = self._identities.get(rank) or identity_in(str(error))
                    failures.append(RankFailure(rank, identity, error))
        return results, failures

    def _kill(self, hung: Mapping[Any, int]) -> None:
        for rank in hung.values():
            ray.kill(self._actors[rank], no_restart=True)
        # Reading the answers of the dead keeps Ray from logging each as an unhandled error.
        ended, _ = ray.wait(list(hung), num_returns=len(hung), timeout=_KILL_WAIT_S) if hung else ([], [])
        for ref in ended:
            with suppress(RayError):
                ray.get(ref)

    def _deadline_error(
        self, hung: Sequence[int], method: str, context: str, timeout_s: float
    ) -> WorkerError:
        names = ", ".join(f"{self._noun} {rank} ({self._identities.get(rank, 'starting')})" for rank in hung)
        message = (
            f"{_where(method, context)} did not return within {timeout_s:g} s on {names}, now stopped; "
            f"{self.world_size - len(hung)} of {self.world_size} {self._noun}s returned"
        )
        return WorkerError(message, None, method, context)


def _start(remote_class: Any, slot: RankSlot, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    options = remote_class.options(
        **slot.options,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": dict(slot.environment)},
    )
    return options.remote(*args, **kwargs)


def _identify(_worker: object) -> RankIdentity:
    use_arrays_for_tensors()
    context = ray.get_runtime_context()
    return RankIdentity(ray.util.get_node_ip_address(), os.getpid(), context.get_worker_id())


def _ranks(results: Mapping[int, Any], failures: Sequence[RankFailure]) -> set[int]:
    return set(results) | {failure.rank for failure in failures}


def _where(method: str, context: str) -> str:
    return f"{method} ({context})" if context else method
