"""Ctrl-C and SIGTERM: kept away from a block that must not stop halfway, and given the same meaning."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_stop_signals() -> Generator[None]:
    """Let Ctrl-C and SIGTERM wait until the block has ended, however it ends; outside the main thread do nothing."""
    arrived: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with kept_stop_handlers():
            for number in _STOP_SIGNALS:
                # An ignored signal stays ignored, as under nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, remember)
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def kept_stop_handlers() -> Generator[None]:
    """Put the handlers of Ctrl-C and SIGTERM back after a block that replaces them, as `ray.init` does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not installed by Python, which cannot put it back
                signal.signal(number, handler)


@contextmanager
def sigterm_as_ctrl_c() -> Generator[threading.Event]:
    """Make the first SIGTERM inside the block a KeyboardInterrupt; the event tells the two apart.

    Later ones change nothing: the run is ending already. Outside the main thread the block runs as it is.
    """
    terminated = threading.Event()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if not terminated.is_set():
            terminated.set()
            raise KeyboardInterrupt

    with kept_stop_handlers():
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, interrupt)
        yield terminated
