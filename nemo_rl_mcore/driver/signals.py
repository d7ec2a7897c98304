"""What asks a process to stop (SIGINT, SIGTERM, SIGHUP, a limit of time, a thread that watches), and its exit status.

The first one lets a block that defers come to its end, the second one does not wait, later ones change nothing: the
process is ending already. What a thread says has failed does not wait either. Only short blocks that must never be cut,
such as the end of a Ray session, hold off all of them.
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
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
# What a thread wakes the main thread by; of a timer that nothing else uses: math-verify sets SIGALRM to its own ends.
_FROM_A_THREAD = signal.SIGVTALRM
_ONE_STOP_S = 1.0
"""A terminal that closes, or a scheduler, may send SIGHUP or SIGTERM to a process twice."""


class TimeLimitReachedError(KeyboardInterrupt):
    """The time that the process was given is over; as little an error of what runs as Ctrl-C is."""


class FailedFromOutsideError(KeyboardInterrupt):
    """What runs here was ended for an error that another thread has seen, its cause; no error of what runs, either.

    Code that handles errors lets it through. Whoever has called `StopSignals.fail` raises the error in its place.
    """


class StopSignals:
    """What has asked this process to stop, and whether that has to wait. `began` is a `time.monotonic`."""

    def __init__(self, *, deferring: bool = False, holding: bool = False) -> None:
        self.began = time.monotonic()
        self.arrived: list[int] = []
        self._asked_at = 0.0
        self.time_is_up = False
        self.due = False
        """A signal has arrived and has not been raised yet."""
        self._failure: BaseException | None = None
        self._cuts = False  # what defers, for the failure
        self._deferring, self._holding = int(deferring), int(holding)
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
        """Return what a shell reports for a program that the first signal ended: 130, 143, 129; 0 if time did."""
        if self.time_is_up and not self.arrived:
            return 0
        return EXIT_STATUS_OF_A_SIGNAL + (self.arrived[0] if self.arrived else signal.SIGINT)

    def arrive(self, number: int, _frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if number == _FROM_A_THREAD:
            if self._failure is not None and not self._cuts:
                return
            if self._failure is None and (self.arrived or self.time_is_up):
                return  # the process is ending already
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
        """Raise KeyboardInterrupt for a signal that has come, unless it is to wait."""
        if not self.due or self._holding or (self._deferring and not (self.insisted or self._cuts)):
            return
        self.due = self._cuts = False
        if self.arrived:
            raise KeyboardInterrupt from self._failure
        if self._failure is not None:
            raise FailedFromOutsideError from self._failure
        raise TimeLimitReachedError

    def stop_if_asked(self) -> None:
        """Raise it also where code that is not ours has swallowed it before."""
        self.due |= self.asked or self.time_is_up
        self.stop_if_due()

    @contextmanager
    def waiting(self, *, hold: bool) -> Generator[None]:
        """Let the first signal wait until the outermost such block has ended; with `hold`, let all of them wait."""
        self._deferring += 1
        self._holding += hold
        try:
            yield
        finally:
            self._deferring -= 1
            self._holding -= hold
            self.stop_if_due()

    def limit_time(self, seconds: float | None) -> None:
        """Ask to stop so many seconds after `began`, in place of what was set before; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            # A thread: an alarm of the process is math-verify's. The signal wakes the main thread from a wait.
            left = max(0.0, self.began + seconds - time.monotonic())
            self._timer = threading.Timer(left, _wake_main_thread)
            self._timer.daemon = True
            self._timer.start()

    def fail(self, error: BaseException) -> bool:
        """Have the main thread end what it does with FailedFromOutsideError, also in a block that defers; called once.

        Where a signal has come it ends with that signal's KeyboardInterrupt, whose cause is the error. Returns whether
        anybody listens.
        """
        if self is not _current:
            return False
        self._failure, self._cuts = error, True
        _wake_main_thread()
        return True


_current: StopSignals | None = None
"""Signals belong to the process, and so does who listens to them."""


def current_stop_signals() -> StopSignals:
    """Return those that are listened to; others, which nothing reaches, where nobody listens."""
    return _current or StopSignals()


@contextmanager
def stop_signals(alone: StopSignals | None = None) -> Generator[StopSignals]:
    """Listen to the signals inside the block, of which the outermost counts them; what they did is for it to say.

    Entered again inside, it takes back handlers that a library has put in their place. A signal that is ignored stays
    ignored, as under nohup. Outside of the main thread nothing is listened to. alone: in place of what listens now.
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

    hold: let all of them wait, for a short block that must never be cut. Where nobody listens to the signals, the
    handlers that there are get them after the block. Outside of the main thread no signal arrives, nothing is done.
    """
    if _current is not None and _in_main_thread():
        with kept_stop_handlers(), _current.waiting(hold=hold):
            yield
        return
    alone = StopSignals(deferring=True, holding=hold)
    try:
        with stop_signals(alone):
            yield
    finally:
        if alone.due:  # for the handlers that are there now
            for number in alone.arrived:
                signal.raise_signal(number)


@contextmanager
def kept_stop_handlers() -> Generator[None]:
    """Put the handlers of the signals back after a block that replaces them, as `ray.init` does."""
    if not _in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, _FROM_A_THREAD)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not installed by Python, which cannot put it back
                signal.signal(number, handler)


def _wake_main_thread() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, _FROM_A_THREAD)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


EXIT_FAILED = 1


def exit_status_of(error: BaseException | None) -> int:
    """0 for a whole run and one that its time limit ended, 1 for a failure, else what a signal asks for, as 130."""
    if isinstance(error, KeyboardInterrupt):
        # Not told by its class: Ray makes a plain one of each.
        status = current_stop_signals().exit_status
        return EXIT_FAILED if status == 0 and run_stopped_by(error) is not None else status
    return 0 if error is None else EXIT_FAILED


def exit_status(run: Callable[[], object], left_behind: Callable[[], str] = str) -> int:
    """Run to the end, to a failure or to a signal; say on stderr how it ended, and what it left.

    Returns 0, also where the time limit ended it, 1 for a failure, also one that the time limit came upon, and what a
    shell reports for a program that a signal ended: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. What was
    left is `left_behind`, or what the notes of the exception say.
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
