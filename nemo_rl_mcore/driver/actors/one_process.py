"""A single rank in this process, without Ray."""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.failures import RankFailure, RankIdentity, WorkerCall, WorkerError, describe
from nemo_rl_mcore.driver.actors.places import Placement, only_environment, rank_environment
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.rendezvous import LISTENING_SOCKET, listen_at

_LOOPBACK = "127.0.0.1"


@dataclass(eq=False)
class OneProcess:
    """A context manager that provides a place in this process for the only rank.

    Inside the block the process has a rank's environment and thread settings, so that results equal a rank's. The end
    restores the process's own settings, its random generators and its exception hook.
    """

    config: ClusterConfig
    _as_before: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Self:
        on_cpu, undo = self.config.on_cpu, self._as_before
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        place = {"MASTER_ADDR": _LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
        inherited = rank_environment(os.environ, on_cpu=on_cpu)
        undo.enter_context(only_environment({**os.environ, **place, **inherited, **rank}))
        if on_cpu:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        undo.callback(setattr, sys, "excepthook", sys.excepthook)
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.enter_context(accelerator.kept_generators())
        return self

    def __exit__(self, *_: object) -> None:
        self._as_before.close()


class InProcessRank:
    """A `WorkerGroup` with one rank, an object in this process; it raises the same errors as `RayWorkerGroup`.

    A first Ctrl-C or SIGTERM ends a call at once or, if the model is trained, after it, as in `RayWorkerGroup`.
    Deadlines do not apply, and secrets are already in the environment.
    """

    def __init__(
        self,
        worker_class: type,
        cluster: OneProcess,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        placement: Placement | None = None,
        name: str = "",
        **_: Any,
    ) -> None:
        self._name, self._deferring = name, bool((kwargs or {}).get("trained"))
        self._worker: Any = None
        self.placement = placement or Placement()
        self.identities = {0: RankIdentity(socket.gethostname(), os.getpid(), "")}
        listener = listen_at(_LOOPBACK)
        os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
        os.environ[LISTENING_SOCKET] = str(listener.detach())
        call = WorkerCall(f"{worker_class.__name__}()", "start of the workers", group=name)
        self._worker = self._answer(call, worker_class, *args, **kwargs or {})

    def share(self, value: Any) -> Any:
        return value

    def run_all(
        self,
        method: str,
        *args: Any,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        answering: Collection[int] | None = None,
        context: str = "",
        timeout_s: float | None = None,
        key: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        call = WorkerCall(method, context, group=self._name)
        if self._worker is None:
            raise call.not_started("the worker group is shut down", "shut-down")
        run = getattr(self._worker, method)
        own = per_rank_kwargs[0] if per_rank_kwargs else {}
        answer = self._answer(call, run, *args, **kwargs, **own)
        return [answer if answering is None or 0 in answering else None]

    def shutdown(self, *, keep_places: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _answer(self, call: WorkerCall, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        disabled = logging.root.manager.disable
        # As with Ray's ranks, warnings of libraries do not reach the terminal, only errors.
        logging.disable(logging.WARNING)
        try:
            deferred = deferred_stop_signals() if self._deferring else nullcontext()
            with deferred, warnings.catch_warnings(action="ignore"):
                return run(*args, **kwargs)
        except WorkerError:
            raise
        except Exception as error:
            report = "".join(traceback.format_exception(error))
            failure = RankFailure(0, self.identities[0], report, error, died=False)
            message = describe([failure], [], str(call), None, f"{self._name} rank".strip())
            raise WorkerError(message, call, failure, usable=self._worker is not None) from error
        finally:
            logging.disable(disabled)
