"""The processes of a run, seen from outside.

A process belongs to the run if it carries the run's marker in its environment, or was once seen below the run's
first process. Either alone can miss one: a process that retitles itself may overwrite its environment, and one
whose parent has died hangs below init.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

# An allowed variable, so that Ray hands it to all its processes.
MARKER_NAME = "MEGATRON_TEST_MARKER"


class ProcessWatch:
    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        self.environment = {MARKER_NAME: self.marker}
        self._seen: dict[int, str] = {}  # start time by pid: a pid can be given to another process
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._look_often, daemon=True)

    def follow(self, pid: int) -> None:
        self._look({pid})
        self._thread.start()

    def alive(self) -> dict[int, str]:
        self._look(set())
        with self._lock:
            return {pid: title_of(pid) for pid in self._seen}

    def all_gone(self, within_s: float, *, but: Collection[str] = ()) -> bool:
        deadline = time.monotonic() + within_s
        while any(title.strip() not in but for title in self.alive().values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def kill_all(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._stopped.set()
        self._thread.join()

    def _look_often(self) -> None:
        while not self._stopped.wait(0.1):
            self._look(set())

    def _look(self, first: set[int]) -> None:
        table = process_table()
        needle = f"{MARKER_NAME}={self.marker}".encode()
        with self._lock:
            family = {pid for pid, start in self._seen.items() if pid in table and table[pid][1] == start}
            family |= first | {pid for pid in table if needle in environment_of(pid)}
            grown = True
            while grown:
                children = {pid for pid, (parent, _) in table.items() if parent in family}
                grown = not children <= family
                family |= children
            self._seen = {pid: table[pid][1] for pid in family if pid in table}


def process_table() -> dict[int, tuple[int, str]]:
    """Parent and start time of each process; a zombie has ended and is left out."""
    table = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # "pid (title) state parent ...", where a title may hold spaces and brackets
        fields = read(entry / "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            table[int(entry.name)] = (int(fields[1]), fields[19].decode())
    return table


def environment_of(pid: int) -> list[bytes]:
    return read(Path(f"/proc/{pid}/environ")).split(b"\0")


def title_of(pid: int) -> str:
    return read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace")


def read(path: Path) -> bytes:
    """What the file holds, nothing if its process has ended or is another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def left_after(seconds: float, pids: Collection[int]) -> list[int]:
    """Those of the processes that still run then; they are killed."""
    within(seconds, lambda: process_table().keys().isdisjoint(pids))
    left = [pid for pid in pids if pid in process_table()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
