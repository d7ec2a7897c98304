"""A script beside a driver: when the driver dies, every process of its Ray session, or of its agents, is killed.

    python reaper.py writers FOLDER
    python reaper.py family NAME=VALUE

FOLDER is that of the session, NAME a variable of the agents. Standard input is a pipe from the driver: a line says that
they have ended by themselves, its end without a line says that the driver is dead. Only the standard library is
imported: it starts at once, and stays small.
"""

import os
import signal
import sys
import time
from contextlib import suppress

_ROUNDS, _PAUSE_S = 20, 0.5


def writers(folder: str) -> list[int]:
    """Return the other processes with a file of the folder open for writing: all that Ray starts, and their children.

    Titles and environments do not tell: some of Ray's processes overwrite theirs.
    """
    found: list[int] = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if pid == os.getpid():
            continue
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if not os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/"):
                    continue
                with open(f"/proc/{pid}/fdinfo/{descriptor}") as lines:
                    flags = next(line for line in lines if line.startswith("flags:"))
                if int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    found.append(pid)
                    break
        except OSError:  # it is gone, or another user's
            continue
    return found


def family(mark: str) -> list[int]:
    """Return the other processes with NAME=VALUE in their environment, all of their sessions, and all below these.

    Whoever has cleared its environment is found as long as its parent runs.
    """
    table: dict[int, tuple[int, int]] = {}  # parent and session of each process
    marked: list[int] = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                _state, parent, _group, session, *_ = file.read().rpartition(b")")[2].split()
            table[pid] = int(parent), int(session)
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    marked.append(pid)
        except OSError:  # it is gone, or another user's
            continue
    sessions = {table[pid][1] for pid in marked}
    found, more = set[int](), {pid for pid, (_, session) in table.items() if session in sessions}
    while more:
        found |= more
        more = {pid for pid, (parent, _) in table.items() if parent in found} - found
    return [*found - {os.getpid()}]


def main(who: str, of: str) -> None:
    """Wait for the driver, then kill in rounds: what dies may have started something meanwhile."""
    if sys.stdin.buffer.readline():
        return
    for _ in range(_ROUNDS):
        for pid in {"writers": writers, "family": family}[who](of):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
