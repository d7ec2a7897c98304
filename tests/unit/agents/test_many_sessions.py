"""Many sessions: open at once, and one after the other with nothing left behind."""

import asyncio
import gc
import os
import resource

import psutil
import pytest
from played_endpoint import played

pytestmark = pytest.mark.stage("processes")

USER = {"role": "user", "content": "hi"}


async def play_session(endpoint, number):
    """Two calls that go on, and a reward."""
    session = endpoint.open(index=number)
    path = f"/sessions/{session.token}"
    first = await endpoint.chat(session, [USER])
    again = [USER, {"role": "assistant", "content": first.message["content"]}, USER]
    second = await endpoint.chat(session, again)
    assert second.message["prompt_token_ids"][: len(session.calls[0].ids)] == session.calls[0].ids
    assert (await endpoint.ask("POST", f"{path}/close", {"reward": number})).status == 200
    assert session.reward == number
    endpoint.sessions.end(session)


@pytest.fixture
def many_descriptors():
    """Both ends of the connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_500_open_sessions_are_all_answered(tokenizer):
    async def play():
        async with played(tokenizer) as endpoint:
            endpoint.model.answering.clear()
            sessions = [endpoint.open(index=number) for number in range(500)]
            asking = [asyncio.create_task(endpoint.chat(session, [USER])) for session in sessions]
            await endpoint.model.was_asked(500)
            health = await endpoint.ask("GET", "/health")
            endpoint.model.answering.set()
            replies = await asyncio.gather(*asking)
            assert health.json["sessions"] == 500
            drawn = {tuple(reply.message["generation_log_probs"]) for reply in replies}
            assert len(drawn) == 500  # each has noise of its own
            return [[*session.calls[0].prompt_P] for session in sessions]

    prompts = asyncio.run(asyncio.wait_for(play(), 60))
    assert all(prompt == prompts[0] for prompt in prompts)


async def leaves_nothing(tokenizer, count, *, megabytes):
    """Play sessions, and compare memory, descriptors and tasks with those after a tenth of them."""
    process = psutil.Process(os.getpid())

    def held():
        gc.collect()
        return process.num_fds(), len(asyncio.all_tasks())

    async with played(tokenizer) as endpoint:
        together, marks = 10, []
        for start in range(0, count, together):
            await asyncio.gather(*(play_session(endpoint, start + i) for i in range(together)))
            endpoint.model.asked.clear()
            if start in (count // 10, count - together):
                await asyncio.sleep(0.1)  # the server's side of the last connections
                marks.append((held(), process.memory_info().rss))
        (before, small), (after, large) = marks
        assert after == before
        assert large - small < megabytes << 20
        assert len(endpoint.sessions) == 0


def test_100_sessions_in_a_row_leave_nothing_behind(tokenizer):
    asyncio.run(asyncio.wait_for(leaves_nothing(tokenizer, 100, megabytes=20), 60))


@pytest.mark.nightly
def test_10000_sessions_in_a_row_leave_nothing_behind(tokenizer):
    """Tokens of ended sessions are remembered, 10,000 at most: about 1 MB."""
    asyncio.run(asyncio.wait_for(leaves_nothing(tokenizer, 10_000, megabytes=20), 3000))
