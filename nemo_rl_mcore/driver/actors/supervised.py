"""The actor's side of supervision, which wraps a worker in the actor's process; `actor.py` is the driver's side.

Processes that only run reward functions import this module, but not torch; only processes with torch send tensors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import register_serializer

from nemo_rl_mcore.driver.actors.failures import RankIdentity
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.activity import Progress, stack_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, dtype

_RAY_FOLDER = str(Path(ray.__file__).parent)


@dataclass(frozen=True)
class Construction:
    """Arguments for a worker's constructor, which its actor runs.

    environment: variables added to the process's environment. secrets: variables set only while the constructor runs;
    they are passed as an argument, since Ray logs `runtime_env`.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def actor_class(worker_class: type, *, with_health: bool = True) -> Any:
    """Return an actor class for `worker_class`, with further methods for its supervisor.

    `_build` runs the worker's constructor, since an actor does not answer until its own constructor has returned;
    `_only_run` runs a method without returning its result. with_health: a second thread answers `_health` (progress
    and, on request, the working thread's stack); without it, methods run in the main thread, for code that handles
    signals.
    """

    class Supervised(worker_class):
        def __init__(self) -> None:
            pass

        def _identify(self) -> RankIdentity:
            context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
            return RankIdentity(host, os.getpid(), context.get_worker_id(), context.get_node_id())

        def _listen(self, address: str) -> int:  # the ranks' rendezvous
            from nemo_rl_mcore.rank.rendezvous import LISTENING_SOCKET, listen_at

            # No other process can take the port, since this process holds it until it listens there.
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
                if "torch" in sys.modules:
                    use_arrays_for_tensors()
            finally:
                for name in construction.secrets:
                    os.environ.pop(name, None)

        def _only_run(self, method: str, *args: Any, **kwargs: Any) -> None:
            getattr(self, method)(*args, **kwargs)

    Supervised.__name__ = Supervised.__qualname__ = worker_class.__name__
    if not with_health:
        return ray.remote(Supervised)

    class Watched(Supervised):
        @ray.method(concurrency_group="health")
        def _health(self, with_stack: bool) -> tuple[Progress, str]:
            thread = vars(self).get("_worker_thread")
            return activity.latest, stack_of(thread, _RAY_FOLDER) if with_stack and thread else ""

    as_actor: Any = ray.remote(concurrency_groups={"health": 1})  # type: ignore[reportCallIssue]
    Watched.__name__ = Watched.__qualname__ = worker_class.__name__
    return as_actor(Watched)


def use_arrays_for_tensors() -> None:
    """Make this process send tensors as arrays, which Ray stores outside the pickle and shares between processes.

    Receivers need no setup; tensors arrive on the CPU, detached. Besides saving copies, this keeps Megatron out of the
    driver: it replaces torch's unpickler for storages, so every reader of a pickled tensor would import it.
    """
    import torch

    def as_array(tensor: Tensor) -> tuple[np.ndarray[Any, Any], dtype]:
        local = tensor.detach().cpu()
        # numpy has no bfloat16, so its bits are sent as integers.
        return (local.view(torch.int16) if tensor.dtype is torch.bfloat16 else local).numpy(), tensor.dtype

    register_serializer(torch.Tensor, serializer=as_array, deserializer=_as_tensor)


def _as_tensor(sent: tuple[np.ndarray[Any, Any], dtype]) -> Tensor:
    import torch

    array, kind = sent
    if not array.flags.writeable:  # as in the object store, but tensors must be writable
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(kind) if kind is torch.bfloat16 else tensor
