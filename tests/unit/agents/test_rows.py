"""Rows of sessions: no sampled token is lost, none is trained twice, none stands in another context."""

import asyncio
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import Drawing

from nemo_rl_mcore.agents.endpoint import transcript_of
from nemo_rl_mcore.agents.session import SessionLimits, Sessions
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import CharTokenizer
from nemo_rl_mcore.data.turns import Ending, Reply
from nemo_rl_mcore.driver.algorithms.algorithm import samples_of
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.transcript import batch_of, require_sampled_ids

CALLS = 12
TEXTS = CharTokenizer()
LIMITS = SessionLimits(context=10_000, calls=CALLS)


def next_prompt(ids, draws):
    """Go on from ids that were said, or branch off, compact or edit them, or say them again."""
    match draws.randrange(6):
        case 0:
            return [*ids[: draws.randint(1, len(ids))], draws.randint(0, 9)]
        case 1:
            return [0, *ids[draws.randint(0, len(ids) - 1) :]]
        case 2:
            place = draws.randrange(len(ids))
            return [*ids[:place], ids[place] + 1, *ids[place + 1 :]]
        case 3:
            return ids
        case _:
            return ids + draws.choices(range(50), k=draws.randint(0, 3))


async def any_history(session, seed):
    """Make calls, some at the same time; retry some, and give some up."""
    draws = random.Random(seed)
    known = [[1, 2, 3]]

    async def call():
        prompt = next_prompt(draws.choice(known), draws)
        asking = asyncio.ensure_future(session.ask(prompt, retry=draws.random() < 0.2))
        if draws.random() < 0.2:
            await asyncio.sleep(0)
            asking.cancel()
        [answered] = await asyncio.gather(asking, return_exceptions=True)
        if not isinstance(answered, BaseException):
            if draws.random() < 0.7:
                session.delivered(answered)
            known.append(answered.ids)

    for _ in range(draws.randint(1, CALLS)):
        await asyncio.gather(*(call() for _ in range(draws.randint(1, 3))))


async def played(seed):
    drawing = Drawing(vocabulary=3)  # prompts that are equal by chance are likely
    session = Sessions().open(Prompt(4, "", ""), 1, LIMITS, drawing)
    await any_history(session, seed)
    return session


def batch_from(*sessions):
    episodes = [transcript_of(one, Reply(0.5), Ending.TERMINATED, [1, 2]) for one in sessions]
    return batch_of(episodes, pad_token_id=0, turns=CALLS, digests=True)


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_each_sampled_token_is_in_one_row_behind_what_it_was_sampled_behind(seed):
    session = asyncio.run(played(seed))
    batch = batch_from(session)
    require_sampled_ids(batch)
    found = []
    for row in range(batch.size):
        ids, turns = batch["input_ids"][row], batch["turn_of_token"][row]
        assert torch.equal(batch["token_mask"][row] > 0, turns > 0)
        for turn in sorted(set(turns[turns > 0].tolist())):
            places = (turns == turn).nonzero().flatten().tolist()
            assert places == [*range(places[0], places[-1] + 1)]
            logprobs = batch["generation_logprobs"][row, places].tolist()
            found.append((ids[: places[0]].tolist(), ids[places].tolist(), logprobs))
    sampled = [
        (one.prompt_P.tolist(), one.answer_N.tolist(), one.logprobs_N.tolist()) for one in session.calls
    ]
    assert sorted(found) == sorted(sampled)


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_rows_do_not_depend_on_which_call_was_answered_first(seed):
    session = asyncio.run(played(seed))
    batch = batch_from(session)
    random.Random(seed).shuffle(session.calls)
    again = batch_from(session)
    for name in ("input_ids", "turn_of_token", "sampled_digests", "generation_logprobs"):
        assert torch.equal(batch[name], again[name]), name


async def test_calls_that_go_on_are_one_row_and_others_begin_one():
    session = Sessions().open(Prompt(4, "", ""), 0, LIMITS, Drawing())
    first = await session.ask([1, 2])
    second = await session.ask([*first.ids, 7])
    await session.ask([*first.ids, 8])
    await session.ask([*second.ids, 9, 9])
    await session.ask([3])
    batch = batch_from(session)
    assert batch[EPISODE].tolist() == [0, 0, 0]
    turns = [sorted(set(row[row > 0].tolist())) for row in batch["turn_of_token"]]
    assert sorted(map(len, turns)) == [1, 1, 3]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_session_has_finished_as_its_last_answer_has(seed):
    session = asyncio.run(played(seed))
    if session.calls:
        assert set(batch_from(session)["finished"].tolist()) == {session.calls[-1].finished}


async def test_what_is_written_of_rows_that_alternate_is_what_each_was_told_and_has_said():
    session = Sessions().open(Prompt(4, "", ""), 0, LIMITS, Drawing())
    first = await session.ask([1], heard=[Message("user", "one")])
    other = await session.ask([2, 3], heard=[Message("user", "two")])
    await session.ask([*first.ids, 7], heard=[Message("tool", "three")])
    await session.ask([*other.ids, 8], heard=[Message("tool", "four")])
    batch = batch_from(session)
    rollout = Rollout(batch, [Prompt(4, "", "")] * 2, [""] * 2)
    told = [
        [one["content"] for one in row.turns if one["role"] != "assistant"]
        for row in samples_of(rollout, 1, TEXTS)
    ]
    said = [[one["role"] for one in row.turns].count("assistant") for row in samples_of(rollout, 1, TEXTS)]
    assert (told, said) == ([["three"], ["four"]], [2, 2])


async def test_a_session_without_a_call_is_its_prompt():
    episode = transcript_of(
        Sessions().open(Prompt(4, "", ""), 0, LIMITS, Drawing()),
        Reply(0.0, dropped="nothing"),
        Ending.DROPPED,
        [5, 6],
    )
    batch = batch_of([episode], pad_token_id=0, turns=CALLS, digests=True)
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["sample_mask"].tolist() == [0.0]
    require_sampled_ids(batch)
