"""The part of an actor that its own process runs around its worker, so that the driver can supervise it (`actor.py`).

A process that only runs reward functions imports this, and never torch: tensors are made to travel where torch is.
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
class Health:
    """Says how far an actor is. stack: Python's, of the thread that works; empty if unasked."""

    progress: Progress
    stack: str = ""


@dataclass(frozen=True)
class Construction:
    """Arguments of a worker's constructor, which its actor runs.

    environment: added to that of the process. secrets: variables that it has while the constructor runs. They travel as
    an argument: what stands in Ray's `runtime_env` is written into Ray's logs.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def actor_class(worker_class: type, *, with_health: bool = True) -> Any:
    """Make an actor of `worker_class`, with further methods for its supervisor.

    `_build` runs the worker's constructor, which the actor's own cannot do, because no actor answers before that is
    over; `_only_run` a method whose answer nobody wants. with_health: a second thread answers `_health`, whatever the
    worker does; without, methods run in the main thread of the process, as code needs that handles signals.
    """

    class Supervised(worker_class):
        def __init__(self) -> None:
            pass

        def _identify(self) -> RankIdentity:
            context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
            return RankIdentity(host, os.getpid(), context.get_worker_id(), context.get_node_id())

        def _listen(self, address: str) -> int:  # where the ranks are to meet
            from nemo_rl_mcore.rank.rendezvous import LISTENING_SOCKET, listen_at

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
        def _health(self, with_stack: bool) -> Health:
            thread = vars(self).get("_worker_thread")
            return Health(activity.current(), stack_of(thread, _RAY_FOLDER) if with_stack and thread else "")

    as_actor: Any = ray.remote(concurrency_groups={"health": 1})  # type: ignore[reportCallIssue]
    Watched.__name__ = Watched.__qualname__ = worker_class.__name__
    return as_actor(Watched)


def use_arrays_for_tensors() -> None:
    """Make this process send tensors as arrays, which Ray keeps out of the pickle and shares between processes.

    A receiver needs nothing; the tensors arrive on the CPU, detached. Besides the copies it saves, it keeps the driver
    free of Megatron: where that is imported it replaces torch's own unpickler of storages, and each pickled tensor
    would make its reader import Megatron too.
    """
    import torch

    def as_array(tensor: Tensor) -> tuple[np.ndarray[Any, Any], dtype]:
        local = tensor.detach().cpu()
        # numpy has no bfloat16; its bits travel as integers.
        return (local.view(torch.int16) if tensor.dtype is torch.bfloat16 else local).numpy(), tensor.dtype

    register_serializer(torch.Tensor, serializer=as_array, deserializer=_as_tensor)


def _as_tensor(sent: tuple[np.ndarray[Any, Any], dtype]) -> Tensor:
    import torch

    array, kind = sent
    # Arrays out of the object store are read-only, and a tensor must not be.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(kind) if kind is torch.bfloat16 else tensor
