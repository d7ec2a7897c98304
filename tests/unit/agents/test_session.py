"""What a session keeps of its calls, whoever asks, how often, and in which order."""

import asyncio

import pytest
from scripted_engine import Drawing

from nemo_rl_mcore.agents.session import (
    ClosedSessionError,
    NoRoomError,
    SessionLimits,
    Sessions,
    noise_of,
)
from nemo_rl_mcore.data.datasets import Prompt

PROMPT = Prompt(7, "what?", "4")
LIMITS = SessionLimits(context=40, calls=4, reserved=10)


def opened(drawing, sessions=None):
    return (Sessions() if sessions is None else sessions).open(PROMPT, 2, LIMITS, drawing)


def test_the_noise_of_a_call_depends_on_its_prompt_and_not_on_when_it_comes():
    async def played(order):
        session = opened(Drawing())
        calls = {key: await session.ask([1, 2, key]) for key in order}
        return {key: call.answer_N.tolist() for key, call in calls.items()}

    assert asyncio.run(played([5, 6, 7])) == asyncio.run(played([7, 5, 6]))
    assert len({noise_of(ids, again) for ids in ([1], [1, 0], [0, 1]) for again in (0, 1)}) == 6


async def test_an_equal_prompt_is_drawn_anew_once_its_answer_was_delivered():
    drawing = Drawing()
    session = opened(drawing)
    first = await session.ask([1, 2])
    undelivered = await session.ask([1, 2])
    session.delivered(first)
    second = await session.ask([1, 2])
    assert undelivered is first
    assert second.repetition == 1
    assert session.calls == [first, second]
    session.delivered(second)
    assert await session.ask([1, 2], retry=True) is second
    assert (len(drawing.asked), first.answer_N.tolist() != second.answer_N.tolist()) == (2, True)


async def test_prompts_that_are_refused_or_given_up_are_not_remembered():
    drawing = Drawing()
    drawing.gate.clear()
    session = opened(drawing)
    for length in (31, 32):
        with pytest.raises(NoRoomError):
            await session.ask([1] * length)
    for prompt in ([1], [2]):
        asking = asyncio.ensure_future(session.ask(prompt))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
    assert session._asked == {}


async def test_a_call_that_is_cancelled_leaves_nothing_and_is_drawn_again_with_the_same_noise():
    drawing = Drawing()
    drawing.gate.clear()
    session = opened(drawing)
    asking = asyncio.ensure_future(session.ask([1, 2]))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    drawing.gate.set()
    again = await session.ask([1, 2])
    assert session.calls == [again]
    first, second = drawing.asked
    assert first["turn_index"].tolist() == second["turn_index"].tolist()


async def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_one():
    whole = await opened(Drawing()).ask([9, 8])
    cut = await opened(Drawing()).ask([9, 8], max_tokens=1)
    assert len(whole.answer_N) > 1
    assert cut.answer_N.tolist() == whole.answer_N[:1].tolist()
    assert cut.digest != whole.digest
    assert not cut.finished


async def test_what_the_engine_raises_ends_the_session():
    drawing = Drawing()
    drawing.error = RuntimeError("gone")
    session = opened(drawing)
    with pytest.raises(RuntimeError):
        await session.ask([1])
    assert session.error is drawing.error
    with pytest.raises(ClosedSessionError):
        await session.ask([2])
