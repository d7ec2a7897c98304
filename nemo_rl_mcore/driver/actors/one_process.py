"""One rank in this very process, without Ray: for commands that train nothing and start nothing else."""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from nemo_rl_mcore.config import ClusterConfig
from nemo_rl_mcore.driver.actors.failures import (
    RankFailure,
    RankIdentity,
    Stall,
    WorkerCall,
    WorkerError,
    describe,
    describe_stall,
)
from nemo_rl_mcore.driver.actors.places import Placement, only_environment, rank_environment
from nemo_rl_mcore.driver.signals import FailedFromOutsideError, current_stop_signals
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.rendezvous import LISTENING_SOCKET, listen_at

_LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class OneProcess:
    """A place in this process for the only rank of a model that nothing trains; a context manager.

    Inside it the process has the environment and the threads of a rank, so that results are those of one. Afterwards it
    has its own again, its random generators as they were, and the hook that shows its errors.
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
    """A `WorkerGroup` of one rank, which is an object of this process; see `RayWorkerGroup` for what it raises.

    A first Ctrl-C or SIGTERM ends a call at once. A thread watches for progress, by the same deadlines; it cannot end
    a call that hangs outside of Python. secrets: those are in the environment of this process.
    """

    def __init__(
        self,
        worker_class: type,
        cluster: OneProcess,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        start_timeout_s: float = 300,
        call_timeout_s: float = 600,
        deadline_keys: str = "",
        placement: Placement | None = None,
        name: str = "",
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._call_timeout_s, self._deadline_keys = name, call_timeout_s, deadline_keys
        self._noun = f"{name} rank".strip()
        self._worker: Any = None
        self._ended: WorkerError | None = None
        self.placement = placement or Placement()
        self.identities = {0: RankIdentity(socket.gethostname(), os.getpid(), "")}
        listener = listen_at(_LOOPBACK)
        os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
        os.environ[LISTENING_SOCKET] = str(listener.detach())
        call = WorkerCall(f"{worker_class.__name__}()", "start of the workers", start_timeout_s, group=name)
        self._worker = self._answer(call, worker_class, *args, **kwargs or {})

    def share(self, value: Any) -> Any:
        return value

    def run_all(
        self,
        method: str,
        *args: Any,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        answering: Collection[int] | None = None,
        timeout_s: float | None = None,
        key: str = "call_timeout_s",
        context: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        deadline = f"{self._deadline_keys}.{key}" if self._deadline_keys and key else ""
        call = WorkerCall(method, context, timeout_s or self._call_timeout_s, deadline, self._name)
        if self._worker is None:
            raise call.not_started("the worker group is shut down", "shut-down")
        if self._ended is not None:
            headline = str(self._ended).partition("\n")[0]
            raise call.not_started(
                f"the worker group ended with an earlier failure: {headline}", "ended-before"
            )
        own = per_rank_kwargs[0] if per_rank_kwargs else {}
        answer = self._answer(call, getattr(self._worker, method), *args, **kwargs, **own)
        return [answer if answering is None or 0 in answering else None]

    def shutdown(self, *, keep_places: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _answer(self, call: WorkerCall, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stalled: list[WorkerError] = []
        over, thread, disabled = threading.Event(), threading.get_ident(), logging.root.manager.disable

        def watch() -> None:
            seen, idle_s, every_s = activity.current(), 0.0, min(_LOOK_EVERY_S, call.timeout_s / 4)
            while idle_s < call.timeout_s:
                if over.wait(every_s):
                    return
                idle_s = idle_s + every_s if activity.current() == seen else 0.0
                seen = activity.current()
            stall = Stall(0, self.identities[0], seen.doing, activity.stack_of(thread))
            message = describe_stall([stall], 1, call, self._noun)
            stalled.append(WorkerError(message, call, code="no-progress"))
            current_stop_signals().fail(stalled[0])

        watcher = threading.Thread(target=watch, name=f"watch of {call}", daemon=True)
        # As of a rank of Ray's, what libraries warn of is not seen on the terminal: errors alone are.
        logging.disable(logging.WARNING)
        try:
            with activity.at(str(call)), warnings.catch_warnings(action="ignore"):
                watcher.start()
                try:
                    return run(*args, **kwargs)
                finally:
                    over.set()
                    watcher.join()
        except FailedFromOutsideError:
            if not stalled:
                raise
            self._ended = stalled[0]
            raise self._ended from None
        except WorkerError:
            raise
        except Exception as error:
            report = "".join(traceback.format_exception(error))
            failure = RankFailure(0, self.identities[0], report, error, died=False)
            message = describe([failure], [], str(call), None, self._noun)
            raise WorkerError(message, call, failure, usable=self._worker is not None) from error
        finally:
            logging.disable(disabled)
