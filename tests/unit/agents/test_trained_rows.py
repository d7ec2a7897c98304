"""Sessions over sockets, of agents that retry, leave, ask at once, edit and compact: what is trained is the record."""

import asyncio
import random

import pytest
from played_endpoint import TOOL, calling, played, request_of

from nemo_rl_mcore.agents.endpoint import transcript_of
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.driver.rollouts.transcript import batch_of, require_sampled_ids

CALLS = 24
AT_ONCE = 16


class AnyAgent:
    """Makes calls of one session as no two harnesses would."""

    def __init__(self, endpoint, session, seed):
        self.endpoint, self.session, self.draws = endpoint, session, random.Random(seed)
        self.messages = [{"role": "user", "content": f"task {seed}"}]

    async def play(self):
        for _ in range(self.draws.randint(1, 5)):
            do = self.draws.choice([self.goes_on, self.goes_on, self.retries, self.leaves, self.asks_at_once])
            await do()
            if self.draws.random() < 0.2:
                self.forgets()
        self.session.close(1.0)

    async def goes_on(self):
        reply = await self.endpoint.chat(self.session, self.messages, tools=[TOOL])
        self.hears(reply)

    async def retries(self):
        """Ask twice, as a client does that saw no answer."""
        first = await self.endpoint.chat(self.session, self.messages, tools=[TOOL])
        again = await self.endpoint.chat(
            self.session, self.messages, tools=[TOOL], headers={"x-stainless-retry-count": "1"}
        )
        assert first.message == again.message
        self.hears(again)

    async def leaves(self):
        """Go away in the middle of a call."""
        body = {"messages": self.messages, "rollout": self.session.token}
        async with self.endpoint.connected() as (_, writer):
            writer.write(request_of("POST", "/v1/chat/completions", body))
            await writer.drain()
            await asyncio.sleep(self.draws.random() / 100)

    async def asks_at_once(self):
        """Branch off in three ways, the same one twice."""
        asked = [[*self.messages, {"role": "user", "content": f"branch {n}"}] for n in (0, 1, 1)]
        replies = await asyncio.gather(*(self.endpoint.chat(self.session, one) for one in asked))
        self.messages = asked[0]
        self.hears(replies[0])

    def hears(self, reply):
        assert reply.status == 200, reply.body
        message = reply.message
        kept = {name: value for name, value in message.items() if not name.endswith(("_ids", "_log_probs"))}
        self.messages.append(self.draws.choice([kept, message]))
        calls = message.get("tool_calls") or []
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": str(self.draws.randint(0, 9))}
            for call in calls
        ] or [{"role": "user", "content": "go on"}]

    def forgets(self):
        """Compact what was said, or edit an answer."""
        if self.draws.random() < 0.5:
            self.messages = [{"role": "user", "content": f"so far: {len(self.messages)}"}]
        elif len(self.messages) > 2:
            self.messages[1] = {"role": "assistant", "content": "what it never said"}


def says(prompt):
    """Some calls of tools, and some words."""
    draws = random.Random(prompt)
    return calling(number=draws.randint(0, 9)) if draws.random() < 0.4 else f"answer {draws.randint(0, 99)}"


async def played_by(tokenizer, count):
    async with played(tokenizer, says) as endpoint:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(seed):
            session = endpoint.open(index=seed, calls=CALLS)
            async with room:
                await AnyAgent(endpoint, session, seed).play()
            endpoint.sessions.end(session)
            return session

        sessions = await asyncio.gather(*map(one, range(count)))
        drawn = len(endpoint.model.asked) - endpoint.model.given_up
        return sessions, drawn


@pytest.mark.parametrize(
    "count", [40, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=["few", "a thousand"]
)
def test_what_is_trained_is_what_was_drawn_and_recorded(tokenizer, count):
    sessions, drawn = asyncio.run(played_by(tokenizer, count))
    assert sum(len(session.calls) for session in sessions) == drawn
    episodes = [
        transcript_of(one, Reply(one.reward), Ending.TERMINATED, [tokenizer.eos_token_id]) for one in sessions
    ]
    batch = batch_of(episodes, pad_token_id=tokenizer.pad_token_id, turns=CALLS, digests=True)
    require_sampled_ids(batch)
    assert len(batch.samples()) == count < batch.size
    for session, rows in zip(sessions, batch.samples(), strict=True):
        trained = [
            digest_of_ids(ids[turns == turn].numpy())
            for ids, turns in zip(batch["input_ids"][rows], batch["turn_of_token"][rows], strict=True)
            for turn in turns.unique().tolist()
            if turn > 0
        ]
        assert sorted(trained) == sorted(call.digest for call in session.calls)
        assert int(batch["token_mask"][rows].sum()) == sum(len(call.answer_N) for call in session.calls)
