"""A Ray session of this machine alone: started for one run in a private folder, and ended with all its processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from nemo_rl_mcore.driver.actors.environment import (
    LISTEN_ON_ALL_INTERFACES,
    only_environment,
    session_environment,
)
from nemo_rl_mcore.driver.actors.raylet_watch import RayletDiedError, watched_raylet
from nemo_rl_mcore.driver.actors.session_folders import SessionFolder
from nemo_rl_mcore.driver.actors.session_processes import RayServers, Reaper, kill, processes_of
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import RunStoppedError

LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 256 << 20
_NEEDED_TO_LEAVE = ("gcs_server", "raylet", "ray::")


class LocalSession:
    """The session of this process; only this machine can reach it, and only this user its folder.

    log_dir: folder of the workers' standard error, once it has started.
    """

    def __init__(self) -> None:
        self.log_dir: Path | None = None
        # For this user alone; not under TMPDIR, since the names of Unix sockets must be short.
        self._held = SessionFolder(Path(os.environ.get("RAY_TMPDIR", "/tmp")))
        self._folder = self._held.path
        self._reaper = Reaper("writers", str(self._folder))
        self._begun = False
        self._servers: RayServers | None = None

    def start(self, *, cpus: int, on_cpu: bool, quiet: Mapping[str, Any]) -> None:
        """Start Ray; `quiet` are further arguments of `ray.init`. On CPU it has no GPUs, and a small object store.

        Raises RunStoppedError when it does not come up, RayletDiedError when a fresh session may; `end` is to follow in
        any case.
        """
        _require_loopback()
        self._begun = True
        # Interrupted halfway, `ray.init` leaves processes that `ray.shutdown` does not know of.
        with (
            deferred_stop_signals(hold=True),
            _children_ignore_stops(),
            only_environment(session_environment(os.environ)),
        ):
            in_folder = self._folder / "ray"  # which Ray opens to everybody: hence the folder above it
            try:
                with watched_raylet(in_folder):
                    context: Any = ray.init(
                        address="local",
                        num_cpus=cpus,
                        num_gpus=0 if on_cpu else None,
                        object_store_memory=_OBJECT_STORE_BYTES if on_cpu else None,
                        include_dashboard=False,
                        _node_ip_address=LOOPBACK,
                        _temp_dir=str(in_folder),
                        **quiet,
                    )
            except Exception as error:  # Ray raises it bare when one of its processes is late
                kind = RayletDiedError if isinstance(error, RayletDiedError) else RunStoppedError
                raise kind(
                    f"the local Ray session did not start: {error}\nIs this machine out of memory, disk space "
                    f"or process slots, or very busy? Ray's logs are in {self._folder}; try again, "
                    "or start a cluster with `ray start --head` and set RAY_ADDRESS",
                    code="session-start",
                ) from error
            self.log_dir = Path(context.address_info["session_dir"]) / "logs"
        self._servers = RayServers(self._folder)

    def lost(self) -> str | None:
        """Return which of Ray's servers has died."""
        return None if self._servers is None else self._servers.lost()

    def kill(self, pid: int) -> None:
        """Kill a process, if it is one of the session's."""
        kill([process for _, process in processes_of(self._folder) if process.pid == pid], wait_s=0)

    def end(self, *, keep_logs: bool) -> None:
        """Kill all its processes, however they fare, and remove the folder; idempotent."""
        # From a session that is lost this process takes leave at its very end, which may take Ray some seconds.
        if self._begun and self.lost() is None and ray.is_initialized():
            # Ray asks its processes to stop one by one, and waits a second for those that do not listen. Without the
            # raylet, which goes with its agents, Ray would end this process here and now, whatever it has to say yet.
            kill([one for name, one in processes_of(self._folder) if not name.startswith(_NEEDED_TO_LEAVE)])
            ray.shutdown()
        else:
            sys.excepthook = (
                sys.__excepthook__
            )  # Ray's would tell a dead server of an exception, and wait for it
        stuck = kill([process for _, process in processes_of(self._folder)])
        self._reaper.dismiss()
        self._held.release()
        if not keep_logs and not stuck:
            shutil.rmtree(self._folder, ignore_errors=True)


def _require_loopback() -> None:
    """Raise RunStoppedError where Ray, imported before `workers` set its switch, would listen on every network."""
    asked_for = os.environ.get(LISTEN_ON_ALL_INTERFACES, "0").lower() in ("1", "true")
    if not asked_for and (address := ray.util.get_node_ip_address()) != LOOPBACK:
        raise RunStoppedError(
            f"a local Ray session would listen on every network, at {address}, since ray was imported before "
            f"nemo_rl_mcore.driver.actors, which has it stay on this machine: import that first, or export "
            f"{LISTEN_ON_ALL_INTERFACES}=0. With 1 it listens everywhere"
        )


@contextmanager
def _children_ignore_stops() -> Generator[None]:
    """Shield processes started inside from SIGTERM and SIGHUP, which schedulers and terminals send to all.

    The driver decides what becomes of its ranks. Ray itself keeps Ctrl-C away from them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
