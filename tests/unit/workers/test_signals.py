import signal
import threading
from collections.abc import Iterator

import pytest

from nemo_rl_mcore.workers.signals import deferred_stop_signals, kept_stop_handlers, sigterm_as_ctrl_c

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """Each test starts with harmless handlers, and must leave them in place."""
    saved = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def unexpected(number: int, _frame: object) -> None:
        pytest.fail(f"signal {number} reached the outer handler")

    signal.signal(signal.SIGTERM, unexpected)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    for number, handler in saved.items():
        signal.signal(number, handler)
    assert after == before


def test_deferred_ctrl_c_comes_after_the_block() -> None:
    finished: list[bool] = []

    def block() -> None:
        with deferred_stop_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert finished


def test_deferred_ctrl_c_comes_when_the_block_fails_and_handlers_were_replaced() -> None:
    def block() -> None:
        with deferred_stop_signals():
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise ValueError("the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)


def test_deferred_sigterm_keeps_its_meaning() -> None:
    def block() -> None:
        with deferred_stop_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not terminated.is_set()

    with sigterm_as_ctrl_c() as terminated:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert terminated.is_set()


def test_replaced_handlers_come_back() -> None:
    with kept_stop_handlers():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_first_sigterm_interrupts_and_later_ones_do_not() -> None:
    with sigterm_as_ctrl_c() as terminated:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert terminated.is_set()


def test_ctrl_c_is_not_taken_for_sigterm() -> None:
    with sigterm_as_ctrl_c() as terminated, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not terminated.is_set()


def test_an_ignored_signal_stays_ignored() -> None:
    outer = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        with sigterm_as_ctrl_c() as terminated, deferred_stop_signals():
            for number in STOP_SIGNALS:
                signal.raise_signal(number)
        assert not terminated.is_set()
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)


def test_another_thread_leaves_the_handlers_alone() -> None:
    done: list[bool] = []

    def use_all() -> None:
        with sigterm_as_ctrl_c(), deferred_stop_signals(), kept_stop_handlers():
            done.append(True)

    thread = threading.Thread(target=use_all)
    thread.start()
    thread.join()
    assert done == [True]
