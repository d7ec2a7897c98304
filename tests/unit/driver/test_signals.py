"""Which signals stop the process, when, and what is known of them afterwards."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nemo_rl_mcore.driver.algorithms.loop import TimeLimit
from nemo_rl_mcore.driver.signals import (
    FailedFromOutsideError,
    TimeLimitReachedError,
    deferred_stop_signals,
    exit_status_of,
    kept_stop_handlers,
    stop_signals,
)

pytestmark = pytest.mark.stage("processes")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
each_signal = pytest.mark.parametrize("number", STOP_SIGNALS)


@pytest.fixture(autouse=True)
def handlers_stay():
    """Each test starts with harmless handlers, and must leave them in place."""
    saved = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def unexpected(number, _frame):
        pytest.fail(f"signal {number} reached the outer handler")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, unexpected)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    for number, handler in saved.items():
        signal.signal(number, handler)
    assert after == before


def later(signals):
    """Let the time pass in which a signal that comes again is the same one."""
    signals._asked_at -= 60


def reached(*steps, hold=False):
    """How many steps are done in a block that defers signals, which then interrupt."""
    done = []

    def block():
        with deferred_stop_signals(hold=hold):
            for step in steps:
                step()
                done.append(step)

    with pytest.raises(KeyboardInterrupt):
        block()
    return len(done)


def sends(number):
    return lambda: signal.raise_signal(number)


@each_signal
def test_the_first_signal_interrupts_and_says_what_it_was(number):
    with stop_signals() as signals:
        assert not bool(signals.arrived)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert (bool(signals.arrived), signals.insisted) == (True, False)
    assert exit_status_of(KeyboardInterrupt(), signals) == 128 + number


@each_signal
def test_a_deferred_signal_comes_at_the_end_of_the_outermost_block(number):
    def inner():
        with deferred_stop_signals():
            signal.raise_signal(number)

    with stop_signals() as signals:
        assert reached(inner, time.monotonic) == 2
        assert not signals.insisted


@each_signal
def test_a_second_signal_does_not_wait_and_later_ones_change_nothing(number):
    with stop_signals() as signals:
        assert reached(sends(number), lambda: later(signals), sends(number), time.monotonic) == 2
        assert signals.insisted
        for again in STOP_SIGNALS:
            signal.raise_signal(again)
    assert exit_status_of(KeyboardInterrupt(), signals) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_sent_twice_at_once_is_one(number):
    with stop_signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(number)
        assert not signals.insisted


def test_a_block_that_is_held_is_never_cut():
    with stop_signals() as signals:
        with deferred_stop_signals():
            assert reached(*[sends(signal.SIGINT)] * 35, hold=True) == 35
        assert signals.insisted


def test_a_deferred_signal_comes_when_the_block_fails_and_its_handlers_were_replaced():
    def block():
        with deferred_stop_signals(hold=True):
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise ValueError("the block")

    with stop_signals() as signals:
        with pytest.raises(KeyboardInterrupt) as caught:
            block()
        assert signal.getsignal(signal.SIGTERM) == signals.arrive
    assert isinstance(caught.value.__context__, ValueError)


def test_without_a_listener_the_handlers_that_are_there_get_what_was_deferred():
    got = []
    outer = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    try:
        with deferred_stop_signals(), deferred_stop_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not got
        assert got == [signal.SIGTERM]
        assert reached(sends(signal.SIGINT), time.monotonic) == 2
    finally:
        signal.signal(signal.SIGTERM, outer)


def test_replaced_handlers_come_back():
    with kept_stop_handlers():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    outer = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        with stop_signals() as signals, deferred_stop_signals():
            for number in STOP_SIGNALS:
                signal.raise_signal(number)
        assert not bool(signals.arrived)
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)


def test_another_thread_leaves_the_handlers_alone():
    done: list[bool] = []

    def use_all():
        with stop_signals(), deferred_stop_signals(), kept_stop_handlers():
            done.append(True)

    thread = threading.Thread(target=use_all)
    thread.start()
    thread.join()
    assert done == [True]


def test_the_limit_of_time_interrupts_a_wait_and_leaves_alarms_to_others():
    began = time.monotonic()
    with stop_signals() as signals:
        signals.limit_time(0.2)
        signal.alarm(0)  # as math-verify does after each answer
        with pytest.raises(TimeLimitReachedError):
            threading.Event().wait(30)
        assert not bool(signals.arrived)
    assert time.monotonic() - began < 10


def test_the_limit_of_time_waits_for_a_block_and_is_no_second_signal():
    ended = []

    def block():
        with deferred_stop_signals():
            signals.limit_time(0)
            time.sleep(0.2)
            ended.append(True)

    with stop_signals() as signals:
        with pytest.raises(TimeLimitReachedError):
            block()
        assert reached(sends(signal.SIGTERM), time.monotonic) == 2, "it is the first signal"
        assert not signals.insisted
    assert ended


def test_the_limit_of_time_interrupts_once():
    """A loop that ends before its time is over may have a timer that is about to end."""
    with stop_signals() as signals:
        with pytest.raises(TimeLimitReachedError):
            TimeLimit(0.0).stop_if_the_next_step_does_not_fit()
        signals.limit_time(0)
        time.sleep(0.1)


def test_the_limit_of_time_comes_to_nothing_once_a_signal_has_come():
    with stop_signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.limit_time(0)
        time.sleep(0.1)
        signals.limit_time(None)


START = """
import sys, time
from nemo_rl_mcore.cli import main
print("here", flush=True)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "nemo_rl_mcore.cli.commands":
            print("loading", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
sys.exit(main(["check", "--config", "recipe.yaml"]))
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGHUP, "hung up")])
def test_a_signal_while_the_command_loads_ends_it_with_a_line(number, word):
    process = subprocess.Popen(
        [sys.executable, "-c", START], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["here\n", "loading\n"]
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (128 + number, f"{word} before the run began\n")


def fails_soon(signals, error):
    """Another thread says so in a moment."""
    thread = threading.Timer(0.1, lambda: signals.fail(error))
    thread.start()
    return thread


def test_what_another_thread_says_has_failed_ends_a_wait_inside_a_block_that_defers():
    error = RuntimeError("nothing moves")
    with stop_signals() as signals:
        thread = fails_soon(signals, error)
        with pytest.raises(FailedFromOutsideError) as caught, deferred_stop_signals():
            time.sleep(60)
        assert caught.value.__cause__ is error
        assert (bool(signals.arrived), signals.time_is_up) == (False, False)
        thread.join()
        signals.limit_time(0.0)  # which comes too late to change how it ends
        time.sleep(0.2)
        with deferred_stop_signals():
            pass


def test_a_failure_while_a_signal_waits_ends_the_wait_and_is_told_as_its_cause():
    error = RuntimeError("nothing moves")
    with stop_signals() as signals:
        thread = fails_soon(signals, error)

        def block():
            with deferred_stop_signals():
                signal.raise_signal(signal.SIGTERM)
                time.sleep(60)

        with pytest.raises(KeyboardInterrupt) as caught:
            block()
        assert caught.type is KeyboardInterrupt
        assert caught.value.__cause__ is error
        assert exit_status_of(KeyboardInterrupt(), signals) == 143
        thread.join()
