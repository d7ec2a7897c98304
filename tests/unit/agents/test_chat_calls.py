"""Chat calls over a socket: what is answered, what is kept, and that a conversation goes on in the tokens sampled."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import TOOLS, byte_tokenizer
from played_endpoint import LONGEST, MODEL, TOOL, VERSION, calling, gym, played, sdk, spelt

from nemo_rl_mcore.agents.endpoint import transcript_of
from nemo_rl_mcore.config.algorithm import GRPOConfig
from nemo_rl_mcore.driver.algorithms.advantages import judge_flaws
from nemo_rl_mcore.driver.rollouts.transcript import batch_of, episode_metrics
from nemo_rl_mcore.environment.turns import Ending, Reply

USER = {"role": "user", "content": "add 1 and 2"}


async def test_an_answer_says_all_that_its_clients_read(tokenizer):
    async with played(tokenizer, lambda _: "three") as endpoint:
        endpoint.model.per_version = 4
        session = endpoint.open()
        reply = await endpoint.chat(session, [USER], logprobs=True, top_logprobs=0)
        [call] = session.calls
    assert reply.status == 200
    assert reply.headers["x-weight-version"] == str(VERSION + 1)
    whole, choice = reply.json, reply.json["choices"][0]
    assert (whole["object"], whole["model"], choice["index"]) == ("chat.completion", MODEL, 0)
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    assert (message["role"], message["content"], "tool_calls" in message) == ("assistant", "three", False)
    assert tokenizer.text_of(message["prompt_token_ids"]) == (
        "<|im_start|>user\nadd 1 and 2<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = message["generation_token_ids"]
    assert ids == [*spelt(tokenizer, "three"), tokenizer.eos_token_id] == call.answer_N.tolist()
    kept = np.array(message["generation_log_probs"], dtype=np.float32)
    assert kept.tobytes() == call.logprobs_N.tobytes()
    spans = [
        {"version": str(VERSION), "start": 0, "end": 4},
        {"version": str(VERSION + 1), "start": 4, "end": 6},
    ]
    assert message["weight_versions"] == choice["weight_versions"] == spans
    shown = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in shown) == "three<|im_end|>"
    assert [one["logprob"] for one in shown] == message["generation_log_probs"]
    used = whole["usage"]
    assert used["completion_tokens"] == 6
    assert used["total_tokens"] == used["prompt_tokens"] + 6


async def test_calls_of_tools_come_apart_and_their_ids_are_the_same_again(tokenizer):
    text = f"I add.\n{calling(a=1)}\n{calling(a=2)}"
    replies = []
    for _ in range(2):
        async with played(tokenizer, lambda _: text) as endpoint:
            replies.append(await endpoint.chat(endpoint.open(), [USER], tools=[TOOL]))
    first, second = replies
    message = first.message
    assert message["content"] == "I add."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 2
    assert message["tool_calls"] == second.message["tool_calls"]
    assert first.json["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "none"])
async def test_without_tools_a_call_is_text(tokenizer, fields):
    async with played(tokenizer, lambda _: calling(a=1)) as endpoint:
        reply = await endpoint.chat(endpoint.open(), [USER], **fields)
    assert reply.message["content"] == calling(a=1)
    assert reply.json["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_at_its_length_limit_is_half_of_it_and_goes_on_behind_the_end_of_its_turn(tokenizer):
    async with played(tokenizer, lambda _: calling(a=1)) as endpoint:
        session = endpoint.open()
        reply = await endpoint.chat(session, [USER], tools=[TOOL], max_tokens=9)
        more = [USER, sdk(reply.message), USER]
        await endpoint.chat(session, more, tools=[TOOL], max_completion_tokens=LONGEST + 5)
        (first, second) = session.calls
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.message["content"] == calling(a=1)[:9]
    assert second.ids[: len(first.ids)] == first.ids
    assert tokenizer.text_of(second.ids[len(first.ids) :]).startswith("<|im_end|>\n<|im_start|>user\n")


async def test_stop_texts_end_an_answer_and_are_not_of_its_content(tokenizer):
    async with played(tokenizer, lambda _: "one STOP two") as endpoint:
        session = endpoint.open()
        reply = await endpoint.chat(session, [USER], stop="STOP")
        again = await endpoint.chat(session, [USER, sdk(reply.message), USER], stop=["STOP", "never"])
        (first, second) = session.calls
    assert reply.message["content"] == again.message["content"] == "one "
    assert tokenizer.text_of(reply.message["generation_token_ids"]) == "one STOP"
    assert second.ids[: len(first.ids)] == first.ids


async def test_an_answer_that_was_not_delivered_is_given_again_and_a_retry_too(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        first = await endpoint.chat(session, [USER])
        retried = await endpoint.chat(session, [USER], headers={"x-stainless-retry-count": "1"})
        anew = await endpoint.chat(session, [USER])
        endpoint.model.answering.clear()
        both = [asyncio.create_task(endpoint.chat(session, [USER])) for _ in range(2)]
        await endpoint.model.was_asked(3)
        while sum(asked.waiting for several in session._asked.values() for asked in several) < 2:
            await asyncio.sleep(0.01)
        endpoint.model.answering.set()
        both, calls = await asyncio.gather(*both), session.calls
    assert first.message == retried.message
    assert first.message["generation_log_probs"] != anew.message["generation_log_probs"]
    assert both[0].message == both[1].message
    assert [call.repetition for call in calls] == [0, 1, 2]
    assert all(reply.message["prompt_token_ids"] == calls[0].prompt_P.tolist() for reply in both)


async def test_who_goes_away_has_the_answer_given_up_unless_another_one_waits(tokenizer):
    async with played(tokenizer) as endpoint:
        session, model = endpoint.open(), endpoint.model
        model.answering.clear()
        for others in (0, 1):
            waiting = [asyncio.create_task(endpoint.chat(session, [USER])) for _ in range(others)]
            leaving = asyncio.create_task(endpoint.chat(session, [USER]))
            await model.was_asked(1 + others)
            await asyncio.sleep(0.05)
            leaving.cancel()
            if not others:
                await model.gave_up(1)
        await asyncio.sleep(0.05)
        model.answering.set()
        status, given_up, calls = (await waiting[0]).status, model.given_up, session.calls
    assert (status, given_up, len(calls)) == (200, 1, 1)
    assert calls[0].repetition == 0


async def test_variables_of_a_call_are_those_of_the_template(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "{% if dry %}DRY{% endif %}" + TOOLS)
    async with played(tokenizer, lambda _: "three") as endpoint:
        session = endpoint.open()
        for variables in ({"dry": True}, {}, {"dry": False}):
            reply = await endpoint.chat(session, [USER], chat_template_kwargs=variables)
            assert reply.status == 200
        refused = await endpoint.chat(session, [USER], chat_template_kwargs={"tokenize": True})
        shown, error = [tokenizer.text_of(call.prompt_P.tolist()) for call in session.calls], refused.error
    assert [text.startswith("DRY") for text in shown] == [True, False, False]
    assert error[:2] == (400, "messages")


async def test_answers_with_flaws_have_the_advantages_of_the_recipe(tokenizer):
    turns = {0: f"<think>one</think>{calling(count=1)}", 1: f"<tool_call>no</tool_call>{calling(count=2)}"}
    script = lambda prompt: turns.get(prompt.count("<tool_response>"), "<think>1</think>2</think>")  # noqa: E731
    async with played(tokenizer, script) as endpoint:
        session, messages = endpoint.open(), [USER]
        for _ in range(3):
            reply = await endpoint.chat(session, messages, tools=[TOOL])
            called = reply.message.get("tool_calls", [])
            messages += [gym(reply.message)]
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "4"} for one in called]
    episode = transcript_of(session, Reply(1.0), Ending.TERMINATED, ())
    assert [reply.get("flaws") for reply in episode.replies] == [
        None,
        ["invalid_tool_call"],
        ["malformed_thinking"],
    ]
    batch = batch_of([episode], pad_token_id=0, turns=3, digests=False)
    batch["advantages"] = torch.full_like(batch["token_mask"], 2.0)
    sizes = {"max_num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2}
    judge_flaws(batch, GRPOConfig(**sizes, invalid_tool_call_advantage=-5.0))
    judge_flaws(batch, GRPOConfig(**sizes, malformed_thinking_advantage=-7.0))
    of_turn = torch.tensor([2.0, 2.0, -5.0, -7.0])  # the first of observations
    assert torch.equal(batch["advantages"], of_turn[batch["turn_of_token"]])
    assert {"episodes/invalid_tool_call": 1.0, "episodes/malformed_thinking": 1.0}.items() <= (
        episode_metrics(batch).items()
    )


RECORDED = json.loads((Path(__file__).parent / "recorded_requests.json").read_text())
TEXTS = [f"<think>one</think>{calling(a=1)}", "the sum is 1"]


def filled(value, known):
    """A recorded value with what this run knows in the place of names."""
    if isinstance(value, dict):
        return {key: filled(held, known) for key, held in value.items()}
    if isinstance(value, list):
        return [filled(held, known) for held in value]
    if isinstance(value, str):
        if value in known:
            return known[value]
        return value.replace("$TOKEN", known["$TOKEN"])
    return value


@pytest.mark.parametrize("harness", RECORDED)
def test_recorded_requests_are_answered_and_go_on_in_the_tokens_that_were_sampled(tokenizer, harness):
    async def play():
        async with played(tokenizer, lambda prompt: TEXTS[prompt.count("<tool_response>")]) as endpoint:
            session = endpoint.open()
            known, replies = {"$TOKEN": session.token}, []
            for recorded in RECORDED[harness]:
                request = filled(recorded, known)
                reply = await endpoint.ask(
                    request["method"], request["path"], request.get("body"), headers=request["headers"]
                )
                assert reply.status == 200, reply.body
                replies.append(reply)
                if "chat" in request["path"] and not request["body"].get("stream"):
                    said = reply.message
                    known["$PROMPT_IDS"] = said["prompt_token_ids"]
                    known["$ANSWER_IDS"] = said["generation_token_ids"]
                    known["$LOGPROBS"] = said["generation_log_probs"]
                    known["$CALL_ID"] = said.get("tool_calls", [{"id": ""}])[0]["id"]
                    known["first"] = known.get("first", said)
            return replies, session.calls, session.reward, known.get("first")

    replies, calls, reward, first = asyncio.run(asyncio.wait_for(play(), 20))
    if harness == "verifiers":
        models, generated, _ = replies
        assert models.json["data"][0]["max_model_len"] == 4000
        [choice] = generated.json["choices"]
        assert [one["token"] for one in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert reward == 1.0
        return
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert len(calls) == 2
    assert calls[1].ids[: len(calls[0].ids)] == calls[0].ids
    assert "tool_response" in tokenizer.text_of(calls[1].prompt_P.tolist()[len(calls[0].ids) :])
    if harness == "NeMo Gym":
        assert replies[0].json["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
        assert [*replies[0].message] == [
            "role",
            "content",
            "tool_calls",
            "prompt_token_ids",
            "generation_token_ids",
            "generation_log_probs",
            "weight_versions",
        ]
        assert replies[2].json["tokens"] == calls[1].prompt_P.tolist()
