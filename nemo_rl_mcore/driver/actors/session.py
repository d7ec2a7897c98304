"""A Ray session of this machine alone: its start in a private folder, its processes, and its end with all of them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from nemo_rl_mcore.driver.actors import reaper
from nemo_rl_mcore.driver.actors.places import (
    LISTEN_ON_ALL_INTERFACES,
    only_environment,
    session_environment,
)
from nemo_rl_mcore.driver.signals import deferred_stop_signals
from nemo_rl_mcore.errors import RunStoppedError

LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 256 << 20
_SERVERS = ("raylet", "gcs_server")


class LocalSession:
    """The session of this process; only this machine can reach it, and only this user its folder.

    log_dir: folder of the workers' standard error, once it has started.
    """

    def __init__(self) -> None:
        self.log_dir: Path | None = None
        # For this user alone; not under TMPDIR, since the names of Unix sockets must be short.
        parent = os.environ.get("RAY_TMPDIR", "/tmp")
        folder = tempfile.mkdtemp(prefix="nemo_rl_mcore_", dir=parent)
        self._folder = Path(folder).resolve()  # as /proc shows it
        self._reaper = Reaper("writers", str(self._folder))
        self._begun = False
        self._servers: Mapping[str, int] = {}

    def start(self, *, cpus: int, on_cpu: bool, quiet: Mapping[str, Any]) -> None:
        """Start Ray; `quiet` are further arguments of `ray.init`. On CPU it has no GPUs, and a small object store.

        Raises RunStoppedError when it does not come up; `end` is to follow in any case.
        """
        asked_for = os.environ.get(LISTEN_ON_ALL_INTERFACES, "0").lower() in ("1", "true")
        if not asked_for and (address := ray.util.get_node_ip_address()) != LOOPBACK:
            raise RunStoppedError(
                f"a local Ray session would listen on every network, at {address}, since ray was imported before "
                f"nemo_rl_mcore.driver.actors, which has it stay on this machine: import that first, or export "
                f"{LISTEN_ON_ALL_INTERFACES}=0. With 1 it listens everywhere"
            )
        self._begun = True
        # Interrupted halfway, `ray.init` leaves processes that `ray.shutdown` does not know of.
        with deferred_stop_signals(hold=True), only_environment(session_environment(os.environ)):
            # Schedulers and terminals send these to all processes, but the driver decides what becomes of its ranks.
            # Ray itself keeps Ctrl-C away from them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
            try:
                context: Any = ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=0 if on_cpu else None,
                    object_store_memory=_OBJECT_STORE_BYTES if on_cpu else None,
                    include_dashboard=False,
                    _node_ip_address=LOOPBACK,
                    # Which Ray opens to everybody: hence the folder above it.
                    _temp_dir=str(self._folder / "ray"),
                    **quiet,
                )
            except Exception as error:  # Ray raises it bare when one of its processes is late
                raise RunStoppedError(
                    f"the local Ray session did not start: {error}\nIs this machine out of memory, disk space "
                    f"or process slots, or very busy? Ray's logs are in {self._folder}; try again, "
                    "or start a cluster with `ray start --head` and set RAY_ADDRESS",
                    code="session-start",
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.log_dir = Path(context.address_info["session_dir"]) / "logs"
        pids = {name: one.pid for name, one in processes_of(self._folder)}
        self._servers = {name: pids[name] for name in _SERVERS if name in pids}

    def lost(self) -> str | None:
        """Return which of Ray's servers has died: without them no rank can be started, asked or ended."""
        for name, pid in self._servers.items():
            if state_of(pid) == "gone":
                return f"Ray's {name} (pid {pid}) died"
        return None

    def kill(self, pid: int) -> None:
        kill([process for _, process in processes_of(self._folder) if process.pid == pid], wait_s=0)

    def end(self, *, keep_logs: bool) -> None:
        """Kill all its processes, however they fare, and remove the folder; idempotent."""
        # From a session that is lost this process takes leave at its very end, which may take Ray some seconds.
        if self._begun and self.lost() is None and ray.is_initialized():
            # Ray asks its processes to stop one by one, and waits a second for those that do not listen. Without the
            # raylet, which goes with its agents, Ray would end this process here and now, whatever it has to say yet.
            kill(
                [one for name, one in processes_of(self._folder) if not name.startswith((*_SERVERS, "ray::"))]
            )
            ray.shutdown()
        else:
            # Ray's would tell a dead server of an exception, and wait for it.
            sys.excepthook = sys.__excepthook__
        stuck = kill([process for _, process in processes_of(self._folder)])
        self._reaper.dismiss()
        if not keep_logs and not stuck:
            shutil.rmtree(self._folder, ignore_errors=True)


def processes_of(folder: Path) -> list[tuple[str, psutil.Process]]:
    """Return every process of the session whose folder this is, known by where it writes, with its name."""
    found: list[tuple[str, psutil.Process]] = []
    for pid in reaper.writers(str(folder)):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append((process.name(), process))
    return found


def kill(processes: Collection[psutil.Process], wait_s: float = 5.0) -> list[psutil.Process]:
    """Kill the processes, stopped ones too, and return those that are still there after `wait_s` seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return psutil.wait_procs(processes, timeout=wait_s)[1]


def state_of(pid: int) -> str:
    """Return the state of a process of this machine: "running", "stopped", ..., or "gone"."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)


class Reaper:
    """A process that waits for the end of this one; if it ends without `dismiss`, the reaper kills whom it is to kill.

    who, of: arguments of `reaper`. Ray's own processes notice a dead driver too, but some of them only after a minute.
    """

    def __init__(self, who: str, of: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, who, of],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # what is sent to the driver's process group is not for the reaper
        )

    def dismiss(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # somebody killed it
                self._process.stdin.write(b"done\n")
                self._process.stdin.close()
            self._process.wait()


@contextmanager
def marked_processes() -> Generator[dict[str, str]]:
    """Yield a variable for the environment of processes that end, with all they start, where this one is killed."""
    name, value = "NEMO_RL_RUN", secrets.token_hex(16)
    killer = Reaper("family", f"{name}={value}")
    try:
        yield {name: value}
    finally:
        killer.dismiss()
