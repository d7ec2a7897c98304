"""What is written in the background of a rank: its errors, and the memory that they hold."""

import threading
import time
import weakref

import pytest

from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.checkpoints import BackgroundWrite


class Copy:
    """Stands for tensors."""


def test_an_error_is_raised_at_each_question_and_holds_nothing_of_the_copy():
    held = []

    def write_part(copy):
        raise OSError(f"no room for {type(copy).__name__}")

    def write():
        copy = Copy()
        held.append(weakref.ref(copy))
        try:
            write_part(copy)
        except OSError as error:
            raise ValueError("not written") from error

    writing = BackgroundWrite(write)
    for _ in range(2):
        with pytest.raises(ValueError, match="not written") as raised:
            writing.seconds(wait=True)
        assert isinstance(raised.value.__cause__, OSError)
    assert held[0]() is None


def test_it_is_asked_while_it_goes_on_and_after_it():
    may_end = threading.Event()
    writing = BackgroundWrite(may_end.wait)
    assert writing.seconds(wait=False) is None
    may_end.set()
    assert writing.seconds(wait=True) > 0
    assert writing.seconds(wait=False) > 0


def test_what_is_written_counts_for_the_process_only_while_somebody_waits_for_it():
    written = [threading.Event() for _ in range(3)]
    may_go_on = [threading.Event() for _ in range(3)]

    def write():
        for number, (done, wait) in enumerate(zip(written, may_go_on, strict=True)):
            activity.advance(f"tensor {number}")
            done.set()
            wait.wait()

    before = activity.latest
    writing = BackgroundWrite(write)
    assert written[0].wait(60)
    assert activity.latest == before
    waiting = threading.Thread(target=writing.join)
    waiting.start()
    for number in (1, 2):
        may_go_on[number - 1].set()
        assert written[number].wait(60)
    until = time.monotonic() + 60
    while activity.latest.doing != "tensor 2" and time.monotonic() < until:
        time.sleep(0.01)
    assert activity.latest.doing == "tensor 2"
    may_go_on[2].set()
    waiting.join()
