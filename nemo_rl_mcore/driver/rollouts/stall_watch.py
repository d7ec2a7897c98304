"""Ends an asynchronous run in which nothing moves, and says what each of its two sides waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from nemo_rl_mcore.driver.signals import current_stop_signals
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank import activity

_LOOK_EVERY_S, _END_WITHIN_S = 1.0, 5.0
_GROUPS_SHOWN = 8


class StallWatch:
    """A thread from `start` to `close`, which sees whether groups are answered and steps end.

    Its clock stands still while the thread that trains is at something that is not timed, see `activity.at`, and while
    the whole process does.

    limit_s: seconds in which nothing moves; None watches nothing. key: of the recipe, that has it. whereabouts: says
    who answers a group, by its ticket. stop: has the thread that trains raise an error when it next waits; called where
    that thread listens to no signals, which reach it wherever it stands.
    """

    def __init__(
        self,
        limit_s: float | None,
        key: str,
        whereabouts: Callable[[str], str],
        stop: Callable[[BaseException], None],
    ) -> None:
        self._limit_s, self._key, self._whereabouts, self._stop = limit_s, key, whereabouts, stop
        self._moves = 0
        self._in_flight: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stall: RunStoppedError | None = None

    def start(self) -> None:
        """Watch the thread that calls this; once is enough."""
        self.moved()
        if self._limit_s is None or self._thread is not None:
            return
        trainer = threading.current_thread()
        self._thread = threading.Thread(
            target=self._watch, args=(trainer, self._limit_s), name="stall watch", daemon=True
        )
        self._thread.start()

    def moved(self) -> None:
        """Take note that a group was answered, or a step has ended; one thread at a time does so."""
        self._moves += 1

    @contextmanager
    def asking(self, ticket: str) -> Generator[None]:
        """Take note that a group is in flight for as long as the block takes."""
        self._in_flight[ticket] = time.monotonic()
        try:
            yield
        finally:
            del self._in_flight[ticket]

    def close(self) -> None:
        """End no run any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)

    def raise_in_place_of(self, error: BaseException | None) -> None:
        """Raise what the watch has said where the run ended with the interrupt that it came by, and no other signal."""
        if self._stall is None or not isinstance(error, KeyboardInterrupt) or current_stop_signals().asked:
            return
        raise self._stall from error

    def _watch(self, trainer: threading.Thread, limit_s: float) -> None:
        every_s, thread = min(_LOOK_EVERY_S, limit_s / 20), trainer.ident or 0
        seen, still_s = self._moves, 0.0
        while not self._closed.wait(every_s):
            if seen != self._moves or not activity.is_timed(thread):
                seen, still_s = self._moves, 0.0
                continue
            still_s += every_s  # as far as this process ran meanwhile
            if still_s >= limit_s:
                message = [
                    f"no group was answered and no step ended for {limit_s:g} s ({self._key})",
                    f"training: {activity.describe(thread) or 'between two parts of a step'}",
                    f"engines: {self._flights()}",
                    f"--- training, where it stood ---\n{activity.stack_of(thread)}",
                ]
                self._stall = RunStoppedError("\n".join(message), code="stalled")
                of_signals = trainer is threading.main_thread() and current_stop_signals()
                if not (of_signals and of_signals.fail(self._stall)):
                    self._stop(self._stall)
                return

    def _flights(self) -> str:
        now, flights = time.monotonic(), [*self._in_flight.items()]
        if not flights:
            return "no group is in flight: none may be asked for before a step ends, or no engine has weights"
        shown = [
            f"{ticket} ({now - since:.1f} s)" + (where and f" at {where}")
            for ticket, since in flights[:_GROUPS_SHOWN]
            for where in [self._whereabouts(ticket)]
        ]
        more = [f"and {len(flights) - len(shown)} more"] if len(flights) > len(shown) else []
        return f"groups in flight: {', '.join(shown + more)}"
