"""A script that runs next to a driver and, if the driver dies, kills all of its Ray session's or agents' processes.

    python reaper.py writers FOLDER-OF-THE-SESSION python reaper.py family NAME=VALUE-OF-THE-AGENTS

Standard input is a pipe from the driver. A line means that the processes have ended normally; the pipe's end without a
line means that the driver has died. Only the standard library is imported, for a quick start.
"""

import os
import signal
import sys
import time
from contextlib import suppress

_ROUNDS, _PAUSE_S = 20, 0.5


def writers(folder: str) -> list[int]:
    """Return the pids of processes that hold a file in the folder open for writing, as all of Ray's processes do."""
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
        except OSError:  # the process has ended, or is another user's
            continue
    return found


def family(mark: str) -> list[int]:
    """Return the pids of processes with NAME=VALUE in their environment, and of their sessions and children."""
    table: dict[int, tuple[int, int]] = {}  # each process's parent and session
    marked: list[int] = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                _state, parent, _group, session, *_ = file.read().rpartition(b")")[2].split()
            table[pid] = int(parent), int(session)
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    marked.append(pid)
        except OSError:  # the process has ended, or is another user's
            continue
    sessions = {table[pid][1] for pid in marked}
    found, more = set[int](), {pid for pid, (_, session) in table.items() if session in sessions}
    while more:
        found |= more
        more = {pid for pid, (parent, _) in table.items() if parent in found} - found
    return [*found - {os.getpid()}]


def main(who: str, of: str) -> None:
    """Wait for the driver's end, then kill in rounds, since dying processes may have started others."""
    if sys.stdin.buffer.readline():
        return
    for _ in range(_ROUNDS):
        for pid in {"writers": writers, "family": family}[who](of):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
