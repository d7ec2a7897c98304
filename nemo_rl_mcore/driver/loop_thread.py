"""An asyncio loop in a thread of its own, for what goes on beside the thread that trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from nemo_rl_mcore.errors import RunStoppedError

_END_WITHIN_S = 10.0


class LoopThread:
    """Runs coroutines that any thread begins; it starts with the first one.

    on_error: told in the loop's thread what a coroutine has raised.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name, self._on_error = name, on_error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._starting = threading.Lock()
        self._tasks = set[asyncio.Task[None]]()

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._start()
        self._loop.call_soon_threadsafe(self._run, coroutine)

    def call[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Have the loop run a coroutine whose result, or error, is for the caller alone."""
        self._start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, and end the thread. Raises RunStoppedError when it does not end."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
            self._thread.join(_END_WITHIN_S)
        if self._thread.is_alive():
            raise RunStoppedError(f"the thread of the {self._name} did not end within {_END_WITHIN_S:g} s")
        self._loop.close()

    def _start(self) -> None:
        with self._starting:
            if not self._thread.is_alive():
                self._thread.start()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself forgets those that wait

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_error(error)

        task.add_done_callback(ended)

    async def _cancel_all(self) -> None:
        await asyncio.sleep(0)  # what was begun just now is a task then
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()
