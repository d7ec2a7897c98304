"""What a session keeps of its calls, whoever asks, how often, and in which order."""

import asyncio

import pytest
from scripted_engine import Drawing

from nemo_rl_mcore.agents.session import (
    ClosedSessionError,
    NoRoomError,
    SessionLimitError,
    SessionLimits,
    Sessions,
    UnknownSessionError,
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


def test_an_equal_prompt_is_drawn_anew_once_its_answer_was_delivered():
    async def play():
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
        return len(drawing.asked), first.answer_N.tolist() != second.answer_N.tolist()

    assert asyncio.run(play()) == (2, True)


def test_prompts_that_are_refused_or_given_up_are_not_remembered():
    async def play():
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
        return session._asked

    assert asyncio.run(play()) == {}


def test_equal_prompts_at_the_same_time_get_one_answer():
    async def play():
        drawing = Drawing(delay=0.01)
        session = opened(drawing)
        calls = await asyncio.gather(*(session.ask([1]) for _ in range(5)))
        return len({id(call) for call in calls}), len(session.calls)

    assert asyncio.run(play()) == (1, 1)


def test_a_call_that_is_cancelled_leaves_nothing_and_is_drawn_again_with_the_same_noise():
    async def play():
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

    asyncio.run(play())


def test_who_waits_for_the_same_answer_is_not_disturbed_by_one_that_goes():
    async def play():
        drawing = Drawing()
        drawing.gate.clear()
        session = opened(drawing)
        goes, stays = (asyncio.ensure_future(session.ask([1, 2])) for _ in range(2))
        await asyncio.sleep(0.01)
        goes.cancel()
        await asyncio.gather(goes, return_exceptions=True)
        drawing.gate.set()
        assert (await stays) is session.calls[0]

    asyncio.run(play())


def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_one():
    async def play():
        whole = await opened(Drawing()).ask([9, 8])
        cut = await opened(Drawing()).ask([9, 8], max_tokens=1)
        assert len(whole.answer_N) > 1
        assert cut.answer_N.tolist() == whole.answer_N[:1].tolist()
        assert cut.digest != whole.digest
        assert not cut.finished

    asyncio.run(play())


def test_limits_are_met_by_name():
    async def play():
        session = opened(Drawing())
        with pytest.raises(NoRoomError, match="maximum context length is 40 tokens"):
            await session.ask([1] * 31)
        for number in range(4):
            await session.ask([number])
        with pytest.raises(SessionLimitError):
            await session.ask([5])
        assert isinstance(session.refused, SessionLimitError)

    asyncio.run(play())


def test_a_session_that_has_drawn_its_tokens_draws_no_more():
    async def play():
        session = Sessions().open(PROMPT, 0, SessionLimits(40, 4, drawn=1), Drawing())
        call = await session.ask([1])
        with pytest.raises(SessionLimitError):
            await session.ask([2])
        assert await session.ask([1], retry=True) is call

    asyncio.run(play())


def test_a_closed_session_is_told_from_one_that_never_was():
    async def play():
        sessions = Sessions()
        session = opened(Drawing(), sessions)
        assert sessions.get(session.token) is session
        session.close(0.5)
        with pytest.raises(ClosedSessionError):
            await session.ask([1])
        with pytest.raises(ClosedSessionError):
            session.close(0.7)
        sessions.end(session)
        sessions.end(session)
        assert session.reward == 0.5
        assert len(sessions) == 0
        with pytest.raises(ClosedSessionError):
            sessions.get(session.token)
        for token in ("sk-forged", None):
            with pytest.raises(UnknownSessionError):
                sessions.get(token)

    asyncio.run(play())


def test_what_the_engine_raises_ends_the_session():
    async def play():
        drawing = Drawing()
        drawing.error = RuntimeError("gone")
        session = opened(drawing)
        with pytest.raises(RuntimeError):
            await session.ask([1])
        assert session.error is drawing.error
        with pytest.raises(ClosedSessionError):
            await session.ask([2])

    asyncio.run(play())
