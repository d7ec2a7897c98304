"""A watch over the raylet of a session that is being started: when it dies, Ray itself waits 30 s for it in silence."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from nemo_rl_mcore.driver.actors.session_processes import state_of
from nemo_rl_mcore.errors import RunStoppedError

_RAYLET = "raylet"
_EVERY_S = 0.2
_TAIL_BYTES, _MOST_LINES, _MOST_OF_A_LINE = 1 << 16, 3, 400


class RayletDiedError(RunStoppedError):
    """The raylet of a session that was being started has ended."""


class _RayletEndedError(BaseException):
    """What the watch raises in the thread that starts Ray; none of Ray's own handlers takes it."""


@contextmanager
def watched_raylet(folder: Path) -> Generator[None]:
    """Raise RayletDiedError, with the raylet's last words, as soon as it dies inside the block, which starts Ray.

    folder: where the session's folder is made. What Ray waits in must return to Python now and then: see
    RAY_raylet_start_wait_time_s in `environment`.
    """
    watch = _Watch()
    try:
        try:
            yield
        finally:
            watch.end()
    except (Exception, _RayletEndedError) as error:
        if watch.ended is None:
            raise
        words = f"Ray's raylet (pid {watch.ended}) died while it started: {_last_words(folder)}"
        raise RayletDiedError(words) from error


class _Watch:
    """A thread that looks at the raylet among the children of this process, and interrupts the one that started it."""

    def __init__(self) -> None:
        self.ended: int | None = None
        """The process of the raylet that has ended."""
        self._before = {child.pid for child in psutil.Process().children()}
        self._starter = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="raylet-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking; after it nothing interrupts."""
        self._over.set()
        self._thread.join()
        _raise_in(self._starter, None)

    def _look(self) -> None:
        raylet: int | None = None
        while not self._over.wait(_EVERY_S):
            raylet = self._started() if raylet is None else raylet
            if raylet is not None and state_of(raylet) == "gone":
                self.ended = raylet
                _raise_in(self._starter, _RayletEndedError)
                return

    def _started(self) -> int | None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if child.pid not in self._before and child.name() == _RAYLET:
                    return child.pid
        return None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise once it is in Python again; None takes back what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _last_words(folder: Path) -> str:
    """Return the errors at the end of the raylet's logs, or their last lines."""
    lines: list[str] = []
    for path in sorted(folder.glob("session_[0-9]*/logs/raylet.*")):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines += [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if " C " in line or " E " in line or "Check failed" in line]
    last = (errors or lines)[-_MOST_LINES:]
    return " | ".join(line[:_MOST_OF_A_LINE] for line in last) or "its logs are empty"
