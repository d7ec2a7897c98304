"""What a session keeps of its calls, whoever asks, how often, and in which order."""

import asyncio
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import Drawing

from nemo_rl_mcore.agents.endpoint import AgentCollector, Endpoint, transcript_of
from nemo_rl_mcore.agents.session import ClosedSessionError, NoRoomError, SessionLimits, Sessions, noise_of
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import CharTokenizer, load_tokenizer
from nemo_rl_mcore.driver.algorithms.algorithm import samples_of
from nemo_rl_mcore.driver.rollouts.player import EpisodeForm, Rollout
from nemo_rl_mcore.driver.rollouts.transcript import batch_of, require_sampled_ids
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.environment.turns import Ending, Reply
from nemo_rl_mcore.recipe.load import load_config

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


CALLS = 12
TEXTS = CharTokenizer()
LONG_LIMITS = SessionLimits(context=10_000, calls=CALLS)


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
    session = Sessions().open(Prompt(4, "", ""), 1, LONG_LIMITS, drawing)
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
    session = Sessions().open(Prompt(4, "", ""), 0, LONG_LIMITS, Drawing())
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
    session = Sessions().open(Prompt(4, "", ""), 0, LONG_LIMITS, Drawing())
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
        Sessions().open(Prompt(4, "", ""), 0, LONG_LIMITS, Drawing()),
        Reply(0.0, dropped="nothing"),
        Ending.DROPPED,
        [5, 6],
    )
    batch = batch_of([episode], pad_token_id=0, turns=CALLS, digests=True)
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["sample_mask"].tolist() == [0.0]
    require_sampled_ids(batch)


CONFIGS = Path(__file__).parents[3] / "examples/configs"
RECIPE = CONFIGS / "grpo_agents_cpu.yaml"
SAMPLES = 3
# Asks once, and leaves its answer to whoever scores it.
SILENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": task["messages"], "rollout": os.environ["OPENAI_API_KEY"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
print(urllib.request.urlopen(request).status)
"""


@dataclass
class Engine:
    """A `GenerationInterface`, and its `respond`."""

    drawing: Drawing
    batches: list[int] = field(default_factory=list)

    def generate(self, data, *, step, greedy=False):
        self.batches.append(data.size)
        if self.drawing.error is not None:
            raise self.drawing.error
        return self.drawing.answer(data)


class Scoring:
    """An `Environments` that gives an answer its number of messages."""

    def __init__(self):
        self.turns, self.drop_reasons = [], {}

    async def replies_soon(self, turns):
        self.turns += turns
        return [Reply(float(len(turn.messages))) for turn in turns]


def opened_endpoint(config, tokenizer):
    return Endpoint(config, tokenizer, [tokenizer.eos_token_id], dict(os.environ))


def played_group(*overrides, drawing=None, soon=False, judges=False, environments=None):
    config = load_config(RECIPE, [*overrides])
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    prompts = [with_template(Prompt(i, f"{i:02d}?", f"{7 * i:02d}"), tokenizer) for i in range(2)]
    engine = Engine(drawing or Drawing(vocabulary=18))
    with opened_endpoint(config, tokenizer) as endpoint:
        collector = AgentCollector(
            engine,
            tokenizer,
            16,
            environments or Scoring(),
            form=EpisodeForm(config.max_rollout_turns, 0, 0, None),
            max_drop_rate=1.0,
            endpoint=endpoint,
            judges=judges,
        )
        asked = collector.ask(prompts, SAMPLES)
        if soon:
            return asyncio.run(collector.play(prompts, asked, engine.drawing)), engine
        return collector.play_now(prompts, asked, step=3), engine


def agent(tmp_path, code):
    (path := tmp_path / "agent.py").write_text(code)
    return f"env.endpoint.command=[{sys.executable},{path}]"


def test_a_group_is_the_same_whether_its_calls_are_answered_together_or_one_by_one():
    now, engine = played_group()
    soon, _ = played_group(soon=True)
    require_sampled_ids(now)
    assert now["token_mask"].sum() > 0
    assert len(now.samples()) == 2 * SAMPLES
    assert sum(engine.batches) >= 2 * SAMPLES
    assert {*now} == {*soon}
    for name, column in now.items():
        assert (
            torch.equal(column, soon[name]) if isinstance(column, torch.Tensor) else column == soon[name]
        ), name
    assert now["prompt_index"].tolist() == sorted(now["prompt_index"].tolist())
    assert EPISODE not in now or now[EPISODE].max() < 2 * SAMPLES


def test_an_agent_that_gives_no_reward_is_scored_by_the_environment(tmp_path):
    environments = Scoring()
    batch, _ = played_group(agent(tmp_path, SILENT), judges=True, environments=environments)
    assert batch["rewards"].tolist() == [2.0] * 2 * SAMPLES  # what was asked, and its answer
    assert {turn.prompt.index for turn in environments.turns} == {0, 1}
    assert all(turn.messages[-1].role == "assistant" for turn in environments.turns)


def test_an_agent_that_nobody_scores_is_dropped_and_says_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("nemo_rl_mcore.agents.endpoint.RETRIES", 0)
    batch, _ = played_group(agent(tmp_path, SILENT))
    assert batch["ending"].tolist() == [Ending.DROPPED] * 2 * SAMPLES
    assert batch["sample_mask"].sum() == 0
    assert all("dropped" in replies[-1] for replies in batch["replies"])
    assert capfd.readouterr().err.count("env.endpoint:") == 1


def test_an_agent_that_fails_is_started_again_and_then_dropped(tmp_path):
    code = f"open({str(tmp_path / 'started')!r}, 'a').write('x')\nraise SystemExit(3)"
    batch, _ = played_group(agent(tmp_path, code))
    assert len((tmp_path / "started").read_text()) == 3 * 2 * SAMPLES
    assert batch["input_lengths"].tolist() == [5] * 2 * SAMPLES
    assert not batch["token_mask"].any()


@pytest.mark.parametrize("soon", [False, True], ids=["together", "one by one"])
def test_what_an_engine_raises_ends_the_group_and_its_agents(soon):
    drawing = Drawing(vocabulary=18)
    drawing.error = EngineDiedError("gone")
    with pytest.raises(EngineDiedError):
        played_group(drawing=drawing, soon=soon)
