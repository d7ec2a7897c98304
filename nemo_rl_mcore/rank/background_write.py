"""A checkpoint that is written in the background of its rank."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from nemo_rl_mcore.rank import activity

_LOOK_EVERY_S = 0.1


class BackgroundWrite:
    """Runs `write` in a background thread, from the start; the rank's thread asks how it went.

    Its progress counts for a rank that waits for it, and hides nothing of a call that the rank is at meanwhile.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._seconds = 0.0
        self._counter = activity.Apart()
        # A daemon: the process may end while a disk hangs.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def seconds(self, *, wait: bool) -> float | None:
        """Return how long it took, None while it goes on; wait: until it has ended. Raises what `write` raised."""
        if wait:
            self.join()
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._seconds

    def join(self) -> None:
        """Wait until it has ended, however that was; its progress is this thread's meanwhile."""
        seen = activity.Progress()
        while self._thread.is_alive():
            self._thread.join(_LOOK_EVERY_S)
            if self._counter.progress != seen:
                seen = self._counter.progress
                activity.advance(seen.doing)

    def _run(self, write: Callable[[], None]) -> None:
        began = time.monotonic()
        with activity.counted_by(self._counter):
            try:
                write()
            except BaseException as error:  # noqa: BLE001  # raised in the thread of who asks
                self._error = error
                _forget_frames(error)
        self._seconds = time.monotonic() - began


def _forget_frames(error: BaseException | None) -> None:
    """Free what the frames of an error and its causes hold: the copy that was to be written."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
