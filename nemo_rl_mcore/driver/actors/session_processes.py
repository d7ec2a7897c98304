"""The processes of a local Ray session, known by where they write, and reapers that outlive the driver."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from nemo_rl_mcore.driver.actors import reaper

_SERVERS = ("raylet", "gcs_server")
_DONE = b"done\n"
_RUN = "NEMO_RL_RUN"
"""The variable by which a run's agents, and what they have started, are found after its end."""


def processes_of(folder: Path) -> list[tuple[str, psutil.Process]]:
    """Return every process of the session whose folder this is, with its name."""
    found: list[tuple[str, psutil.Process]] = []
    for pid in reaper.writers(str(folder)):
        try:
            process = psutil.Process(pid)
            found.append((process.name(), process))
        except psutil.NoSuchProcess:
            continue
    return found


def kill(processes: Collection[psutil.Process], wait_s: float = 5.0) -> list[psutil.Process]:
    """Kill the processes, stopped ones too, and return those that are still there after `wait_s` seconds."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return psutil.wait_procs(processes, timeout=wait_s)[1]


def state_of(pid: int) -> str:
    """Return what the system says of a process of this machine: "running", "stopped", ..., or "gone"."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)


class RayServers:
    """The raylet and the GCS of a local session: without them no rank can be started, asked or ended."""

    def __init__(self, folder: Path) -> None:
        self._pids = {name: process.pid for name, process in processes_of(folder)}

    def lost(self) -> str | None:
        """Return which of them has died; None while both run."""
        for name in _SERVERS:
            pid = self._pids.get(name)
            if pid is not None and state_of(pid) == "gone":
                return f"Ray's {name} (pid {pid}) died"
        return None


class Reaper:
    """A process that waits for the end of this one; if it ends without `dismiss`, the reaper kills whom it is to kill.

    who, of: see `reaper.WHO`. Ray's own processes notice a dead driver too, but some of them only after a minute.
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
        """End the reaper, which kills nobody; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.write(_DONE)
                self._process.stdin.close()
            except BrokenPipeError:  # somebody killed it
                pass
            self._process.wait()


@contextmanager
def marked_processes() -> Generator[dict[str, str]]:
    """Yield a variable for the environment of processes that end, with all they start, where this one is killed."""
    value = secrets.token_hex(16)
    killer = Reaper("family", f"{_RUN}={value}")
    try:
        yield {_RUN: value}
    finally:
        killer.dismiss()
