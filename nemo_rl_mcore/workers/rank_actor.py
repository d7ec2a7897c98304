"""A worker class as a Ray actor: built by a call, and able to say how far it is while it works."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from nemo_rl_mcore import activity
from nemo_rl_mcore.activity import stack_of
from nemo_rl_mcore.rendezvous import LISTENING_SOCKET, listen_at
from nemo_rl_mcore.workers.failures import RankIdentity
from nemo_rl_mcore.workers.tensor_transport import use_arrays_for_tensors

_HEALTH = "health"
_RAY_FOLDER = str(Path(ray.__file__).parent)


@dataclass(frozen=True)
class Health:
    """What a rank says of itself while it works. stack: Python's, of the thread that works; empty if not asked for."""

    progress: activity.Progress
    stack: str = ""


@dataclass(frozen=True)
class Construction:
    """What a rank needs to run its worker's constructor.

    environment: added to that of the process. secrets: variables that it has while the constructor runs. They travel as
    an argument: what stands in Ray's `runtime_env` is written into Ray's logs.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def identity_of_this_process() -> RankIdentity:
    """Which process of Ray's this one is."""
    context = ray.get_runtime_context()
    host = ray.util.get_node_ip_address()
    return RankIdentity(host, os.getpid(), context.get_worker_id(), context.get_node_id())


def actor_class(worker_class: type) -> Any:
    """`worker_class` as an actor, with methods of its own for `RayWorkerGroup`.

    _identify: which process it is. _listen: take a port where the ranks are to meet. _build: run the worker's
    constructor, which the actor's own cannot do, because no actor answers before that is over. _only_run: a method
    whose answer nobody wants, and which is no coroutine. _health: answered by a thread of its own, whatever the worker
    does.
    """

    class Rank(worker_class):
        def __init__(self) -> None:
            pass

        def _identify(self) -> RankIdentity:
            use_arrays_for_tensors()
            return identity_of_this_process()

        def _listen(self, address: str) -> int:
            # The port is free because this process, which is to listen there, has it already.
            listener = listen_at(address)
            port: int = listener.getsockname()[1]
            os.environ[LISTENING_SOCKET] = str(listener.detach())
            return port

        def _build(self, construction: Construction) -> None:
            self._worker_thread = threading.get_ident()
            os.environ.update(construction.environment)
            os.environ.update(construction.secrets)
            try:
                super().__init__(*construction.args, **construction.kwargs)
            finally:
                for name in construction.secrets:
                    os.environ.pop(name, None)

        def _only_run(self, method: str, *args: Any, **kwargs: Any) -> None:
            getattr(self, method)(*args, **kwargs)

        @ray.method(concurrency_group=_HEALTH)
        def _health(self, with_stack: bool) -> Health:
            thread = vars(self).get("_worker_thread")
            return Health(activity.current(), stack_of(thread, _RAY_FOLDER) if with_stack and thread else "")

    Rank.__name__ = Rank.__qualname__ = worker_class.__name__
    as_actor: Any = ray.remote(concurrency_groups={_HEALTH: 1})  # type: ignore[reportCallIssue]
    return as_actor(Rank)
