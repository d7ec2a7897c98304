"""The driver threads' current activities, which the stall watch reads, and a thread with an asyncio loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from nemo_rl_mcore.errors import RunStoppedError

_END_WITHIN_S = 10.0
_of_threads: dict[int, list[tuple[Callable[[], str], bool | None, float]]] = {}
"""Activities by thread, outermost block first: description, timed (see `at`), monotonic seconds of the start."""


@contextmanager
def at(what: str | Callable[[], str], *, timed: bool | None = None) -> Generator[None]:
    """Describe this thread's activity for the duration of the block; a callable may be called from any thread.

    timed: False if the stall watch must not count the time, for work that may take long or has its own deadline; None
    to inherit from the enclosing block (True without one).
    """
    stack = _of_threads.setdefault(threading.get_ident(), [])
    stack.append(((lambda: what) if isinstance(what, str) else what, timed, time.monotonic()))
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            del _of_threads[threading.get_ident()]


def is_timed(thread: int) -> bool:
    """Return True if the stall watch counts the time of the thread's current activity."""
    given = [timed for _, timed, _ in (*_of_threads.get(thread, ()),) if timed is not None]
    return given[-1] if given else True


def describe(thread: int) -> str:
    """Return a thread's current activities, outermost first, each with the seconds since its start."""
    now, current = time.monotonic(), (*_of_threads.get(thread, ()),)
    return ", ".join(f"{what()} ({now - since:.1f} s)" for what, _, since in current)


class LoopThread:
    """A thread with an asyncio loop that runs coroutines for any thread.

    on_error: called in the loop's thread with each error of a coroutine started by `begin`.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name, self._on_error = name, on_error
        self._loop = asyncio.new_event_loop()
        self._tasks = set[asyncio.Task[None]]()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def run() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)  # the loop itself keeps no reference to waiting tasks
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_error(error)

        self._loop.call_soon_threadsafe(run)

    def call[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine whose result or error only the caller gets."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel all coroutines and end the thread; raise RunStoppedError if it does not end."""

        async def cancel_all() -> None:
            await asyncio.sleep(0)  # a coroutine that was just begun becomes a task
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop)
            self._thread.join(_END_WITHIN_S)
        if self._thread.is_alive():
            raise RunStoppedError(f"the thread of the {self._name} did not end within {_END_WITHIN_S:g} s")
        self._loop.close()
