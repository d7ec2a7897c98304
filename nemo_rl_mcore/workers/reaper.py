"""A script beside a driver: when the driver dies, every process of its Ray session is killed.

    python reaper.py FOLDER

FOLDER is that of the session. Standard input is a pipe from the driver: a line says that the session has ended by
itself, its end without a line says that the driver is dead. Only the standard library is imported: it starts at once,
and stays small.
"""

import os
import signal
import sys
import time

_ROUNDS, _PAUSE_S = 20, 0.5


def writers(folder: str) -> list[int]:
    """Return the other processes with a file of the folder open for writing: all that Ray starts, and their children.

    Titles and environments do not tell: some of Ray's processes overwrite theirs.
    """
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in numbers if pid != os.getpid() and _writes_into(pid, folder)]


def _writes_into(pid: int, folder: str) -> bool:
    try:
        return any(
            os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/")
            and _may_write(f"/proc/{pid}/fdinfo/{descriptor}")
            for descriptor in os.listdir(f"/proc/{pid}/fd")
        )
    except OSError:  # it is gone, or another user's
        return False


def _may_write(fdinfo: str) -> bool:
    with open(fdinfo) as lines:
        flags = next(line for line in lines if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def main(folder: str) -> None:
    """Wait for the driver, then kill in rounds: what dies may have started something meanwhile."""
    if sys.stdin.buffer.readline():
        return
    for _ in range(_ROUNDS):
        for pid in writers(folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1])
