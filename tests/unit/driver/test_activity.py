"""The thread of an asyncio loop: what it is given runs, tells its errors, and is over when it is closed."""

import asyncio
import threading

import pytest

from nemo_rl_mcore.driver.activity import LoopThread
from nemo_rl_mcore.errors import RunStoppedError


async def raises():
    raise KeyError("lost")


def test_results_and_errors_of_a_call_are_the_callers_alone():
    told = []
    thread = LoopThread("test", told.append)

    async def gives():
        return threading.current_thread().name

    assert thread.call(gives()).result(30) == "test"
    with pytest.raises(KeyError, match="lost"):
        thread.call(raises()).result(30)
    thread.close()
    assert told == []


def test_errors_of_what_was_begun_are_told_in_the_thread():
    told = []
    thread = LoopThread("test", lambda error: told.append((error, threading.current_thread().name)))
    thread.begin(raises())
    thread.call(asyncio.sleep(0.05)).result(30)
    thread.close()
    [(error, where)] = told
    assert (str(error), where) == ("'lost'", "test")


def test_what_was_begun_just_before_the_end_is_cancelled():
    thread, ended = LoopThread("test", print), []

    async def begins_another():
        thread.begin(waits())

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    for _ in range(3):
        thread.begin(waits())
    thread.call(asyncio.sleep(0)).result(30)
    thread.begin(begins_another())
    thread.close()
    assert 3 <= len(ended) <= 4


def test_an_end_that_is_not_reached_is_named(monkeypatch):
    monkeypatch.setattr("nemo_rl_mcore.driver.activity._END_WITHIN_S", 0.1)
    thread, goes_on = LoopThread("test", print), threading.Event()

    async def blocks():
        goes_on.wait(60)

    thread.begin(blocks())
    with pytest.raises(RunStoppedError, match=r"thread of the test did not end within 0\.1 s"):
        thread.close()
    goes_on.set()
    thread._thread.join(30)
    thread.close()
