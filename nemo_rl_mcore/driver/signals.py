"""Requests to stop a process (SIGINT, SIGTERM, SIGHUP, a time limit, a thread that watches), and its exit status.

The first signal waits for the end of a deferring block, the second takes effect at once, and later ones have no effect,
since the process is already ending. A failure reported by a thread does not wait either. Only short blocks that must
never be interrupted, such as a Ray session's end, defer all of them.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.errors import RunStoppedError, run_stopped_by

EXIT_STATUS_OF_A_SIGNAL = 128
EXIT_FAILED = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED_BY = {
    EXIT_STATUS_OF_A_SIGNAL + signal.SIGINT: "interrupted",
    EXIT_STATUS_OF_A_SIGNAL + signal.SIGTERM: "terminated",
    EXIT_STATUS_OF_A_SIGNAL + signal.SIGHUP: "hung up",
}
"""Words for a process's end by a signal, by exit status."""
# A thread wakes the main thread with an otherwise unused timer signal, since math-verify uses SIGALRM.
_FROM_A_THREAD = signal.SIGVTALRM
_ONE_STOP_S = 1.0
"""A terminal that closes, or a scheduler, may send SIGHUP or SIGTERM to a process twice."""


class TimeLimitReachedError(KeyboardInterrupt):
    """The process's time limit has passed; like Ctrl-C, this is not an error of the run."""


class FailedFromOutsideError(KeyboardInterrupt):
    """Another thread has stopped the current work because of an error, which is the cause.

    Error handlers let it pass. The caller of `StopSignals.fail` raises the error in its place.
    """


class StopSignals:
    """Stop requests so far.

    arrived: signal numbers, in order. began: a `time.monotonic` value. due: True while a request must still be raised.
    """

    def __init__(self, *, deferring: bool = False, holding: bool = False) -> None:
        self.began = time.monotonic()
        self.arrived: list[int] = []
        self._asked_at = 0.0
        self.time_is_up = self.due = False
        self._failure: BaseException | None = None
        self._cuts = False  # True while a failure must end even a deferring block
        self.deferring, self.holding = int(deferring), int(holding)
        self._timer: threading.Timer | None = None

    @property
    def stopping(self) -> bool:
        return bool(self.arrived) or self.time_is_up

    @property
    def insisted(self) -> bool:
        return len(self.arrived) > 1

    def arrive(self, number: int, _frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if number == _FROM_A_THREAD:
            if self._failure is not None and not self._cuts:
                return
            if self._failure is None and (self.arrived or self.time_is_up):
                return  # the process is already ending
            self.time_is_up |= self._failure is None
        else:
            again = self.arrived and number != signal.SIGINT and now - self._asked_at < _ONE_STOP_S
            if again or self.insisted:
                return
            self.arrived.append(number)
            self._asked_at = now
        self.due = True
        self.stop_if_due()

    def stop_if_due(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived, unless it is deferred."""
        if not self.due or self.holding or (self.deferring and not (self.insisted or self._cuts)):
            return
        self.due = self._cuts = False
        if self.arrived:
            raise KeyboardInterrupt from self._failure
        if self._failure is not None:
            raise FailedFromOutsideError from self._failure
        raise TimeLimitReachedError

    def stop_if_asked(self) -> None:
        """Like `stop_if_due`, but also raise for a signal whose KeyboardInterrupt other code has swallowed."""
        self.due |= self.stopping
        self.stop_if_due()

    def limit_time(self, seconds: float | None) -> None:
        """Request a stop this many seconds after `began`, replacing an earlier limit; None for no limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            # Use a thread, since math-verify uses the process's alarm. The signal interrupts the main thread's wait.
            left = max(0.0, self.began + seconds - time.monotonic())
            main_thread = threading.main_thread().ident or 0
            self._timer = threading.Timer(left, signal.pthread_kill, (main_thread, _FROM_A_THREAD))
            self._timer.daemon = True
            self._timer.start()

    def fail(self, error: BaseException) -> bool:
        """End the main thread's work, even in a deferring block; called once. Return False without a listener.

        The main thread gets FailedFromOutsideError, or an earlier signal's KeyboardInterrupt; the error is its cause.
        """
        if self is not _current:
            return False
        self._failure = error
        self._cuts = True
        main_thread = threading.main_thread().ident or 0
        signal.pthread_kill(main_thread, _FROM_A_THREAD)
        return True


_current: StopSignals | None = None
"""The process's only listener, since signals belong to the process."""


def current_stop_signals() -> StopSignals:
    """Return the current listener's signals or, without a listener, an object that receives none."""
    return _current or StopSignals()


@contextmanager
def stop_signals(alone: StopSignals | None = None) -> Generator[StopSignals]:
    """Listen to signals inside the block, and yield those that have arrived; nested blocks share one object.

    A nested block reinstalls handlers that a library has replaced. An ignored signal stays ignored, as under nohup.
    Only the main thread can listen. alone: an object to use in place of the current one.
    """
    global _current
    outer, signals = _current, alone or _current or StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    with kept_stop_handlers():
        for number in (*_STOP_SIGNALS, _FROM_A_THREAD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signals.arrive)
        _current = signals
        try:
            yield signals
        finally:
            _current = outer
            if outer is not signals:
                signals.limit_time(None)


@contextmanager
def deferred_stop_signals(*, hold: bool = False) -> Generator[None]:
    """Defer the first signal to the end of the outermost such block; a second signal takes effect at once.

    hold: defer all signals, for a short block that must never be interrupted. Without a listener, the installed
    handlers receive the signals after the block. Only the main thread receives signals.
    """
    if _current is not None and threading.current_thread() is threading.main_thread():
        signals = _current
        with kept_stop_handlers():
            signals.deferring += 1
            signals.holding += hold
            try:
                yield
            finally:
                signals.deferring -= 1
                signals.holding -= hold
                signals.stop_if_due()
        return
    alone = StopSignals(deferring=True, holding=hold)
    try:
        with stop_signals(alone):
            yield
    finally:
        if alone.due:  # for the handlers that are installed now
            for number in alone.arrived:
                signal.raise_signal(number)


@contextmanager
def kept_stop_handlers() -> Generator[None]:
    """Restore the signal handlers after a block that replaces them, as `ray.init` does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, _FROM_A_THREAD)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)


def exit_status_of(error: BaseException | None, signals: StopSignals | None = None) -> int:
    """Return 0 for a complete run or one ended by its time limit, 1 for a failure, else the first signal's status.

    A signal's status is a shell's: 130, 143, 129. signals: None for the current ones.
    """
    if not isinstance(error, KeyboardInterrupt):
        return 0 if error is None else EXIT_FAILED
    signals = signals or current_stop_signals()
    # The error's class does not matter: Ray converts each to a plain KeyboardInterrupt.
    if signals.arrived or not signals.time_is_up:
        return EXIT_STATUS_OF_A_SIGNAL + (signals.arrived[0] if signals.arrived else signal.SIGINT)
    return 0 if run_stopped_by(error) is None else EXIT_FAILED


def exit_status(run: Callable[[], object], left_behind: Callable[[], str] = str) -> int:
    """Call `run`, print the reason for an early end on standard error, and return `exit_status_of` its end.

    The printed line includes the exception's notes and the text that `left_behind` returns.
    """
    with stop_signals() as signals:
        try:
            run()
        except KeyboardInterrupt as stop:
            failure, status = run_stopped_by(stop), exit_status_of(stop, signals)
            how = STOPPED_BY.get(status, "time is up (checkpointing.checkpoint_must_save_by)")
            line = "; ".join(filter(None, [how, *getattr(stop, "__notes__", ()), left_behind()]))
            write_line(sys.stderr if status else sys.stdout, line)
            if failure is not None:
                write_line(sys.stderr, f"the run stopped: {failure}")
            return status
        except RunStoppedError as error:
            told = "\n".join([f"the run stopped: {error}", *getattr(error, "__notes__", ())])
            write_line(sys.stderr, told)
            return EXIT_FAILED
    return 0
