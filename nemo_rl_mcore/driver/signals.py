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
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
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
    """Stop requests so far. began: a `time.monotonic` value. due: whether a request must still be raised."""

    def __init__(self, *, deferring: bool = False, holding: bool = False) -> None:
        self.began = time.monotonic()
        self.arrived: list[int] = []
        self._asked_at = 0.0
        self.time_is_up = self.due = False
        self._failure: BaseException | None = None
        self._cuts = False  # blocks that defer, for the failure
        self.deferring, self.holding = int(deferring), int(holding)
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        return bool(self.arrived)

    @property
    def insisted(self) -> bool:
        return len(self.arrived) > 1

    @property
    def word(self) -> str:
        return _WORDS[signal.Signals(self.arrived[0] if self.arrived else signal.SIGINT)]

    @property
    def exit_status(self) -> int:
        """A shell's status for a program ended by the first signal: 130, 143, 129; 0 for the time limit."""
        if self.time_is_up and not self.arrived:
            return 0
        return EXIT_STATUS_OF_A_SIGNAL + (self.arrived[0] if self.arrived else signal.SIGINT)

    def arrive(self, number: int, _frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if number == _FROM_A_THREAD:
            if self._failure is not None and not self._cuts:
                return
            if self._failure is None and (self.arrived or self.time_is_up):
                return  # the process is already ending
            self.time_is_up |= self._failure is None
        else:
            again = self.asked and number != signal.SIGINT and now - self._asked_at < _ONE_STOP_S
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
        self.due |= self.asked or self.time_is_up
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
        self._failure, self._cuts = error, True
        signal.pthread_kill(threading.main_thread().ident or 0, _FROM_A_THREAD)
        return True


_current: StopSignals | None = None
"""The process's only listener, since signals belong to the process."""


def current_stop_signals() -> StopSignals:
    """Return the current listener's signals; without a listener, an object that receives none."""
    return _current or StopSignals()


@contextmanager
def stop_signals(alone: StopSignals | None = None) -> Generator[StopSignals]:
    """Listen to the signals inside the block, whose caller judges afterwards what has arrived; outer blocks share it.

    Entered again inside, it takes back handlers that a library has replaced. An ignored signal stays ignored, as under
    nohup. Other threads than the main one listen to nothing. alone: listen with these in place of the current ones.
    """
    global _current
    outer, signals = _current, alone or _current or StopSignals()
    if not _in_main_thread():
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
    """Let the first signal wait until the outermost such block has ended, however it ends; a second one does not wait.

    hold: let all signals wait, for a short block that must never be cut. Without a listener the installed handlers get
    them after the block. Other threads than the main one get no signals.
    """
    if _current is not None and _in_main_thread():
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
    if not _in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, _FROM_A_THREAD)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def exit_status_of(error: BaseException | None) -> int:
    """Return 0 for a complete run or one ended by its time limit, 1 for a failure, else a signal's status (130)."""
    if not isinstance(error, KeyboardInterrupt):
        return 0 if error is None else EXIT_FAILED
    # The class does not matter: Ray converts each to a plain KeyboardInterrupt.
    status = current_stop_signals().exit_status
    return EXIT_FAILED if status == 0 and run_stopped_by(error) is not None else status


def exit_status(run: Callable[[], object], left_behind: Callable[[], str] = str) -> int:
    """Run to the end, to a failure or to a signal; print on stderr how it ended and what it left; return the status.

    0, also where the time limit ended it; 1 for a failure, also one that the time limit came upon; for a signal the
    shell's status: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. `left_behind` and the exception's notes
    describe what was left.
    """
    with stop_signals() as signals:
        try:
            run()
        except KeyboardInterrupt as stop:
            failure, status = run_stopped_by(stop), exit_status_of(stop)
            up = "time is up (checkpointing.checkpoint_must_save_by)"
            how = up if signals.exit_status == 0 else signals.word
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
