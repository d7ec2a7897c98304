"""Where a session's token may stand, what needs one, and what the other routes tell."""

import asyncio
import json
import math
from datetime import date

import pytest
from played_endpoint import MODEL, VERSION, played

from nemo_rl_mcore.agents.session import SessionLimits
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.errors import RunStoppedError

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


WAYS = {
    "path": lambda token: (f"/sessions/{token}{CHAT}", BODY, {"authorization": "Bearer dummy_key"}),
    "path of gym": lambda token: (f"/ng-rollout/{token}{CHAT}", BODY, {"x-session-id": "8044d24a"}),
    "header": lambda token: (CHAT, BODY, {"X-Session-ID": token, "authorization": "Bearer EMPTY"}),
    "rollout": lambda token: (CHAT, {**BODY, "rollout": token}, {"authorization": "Bearer dummy_key"}),
    "session": lambda token: (CHAT, {**BODY, "session": token, "rollout": {"prompt": 7}}, {}),
    "key": lambda token: (CHAT, BODY, {"authorization": f"Bearer {token}", "x-session-id": "8044d24a"}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_the_token_is_found_wherever_a_client_puts_it(tokenizer, way):
    async with played(tokenizer) as endpoint:
        session, other = endpoint.open(), endpoint.open()
        path, body, headers = way(session.token)
        found = await endpoint.ask("POST", path, body, headers=headers)
        path, body, headers = way(session.token[:-1])
        forged = await endpoint.ask("POST", path, body, headers=headers)
        session.close()
        path, body, headers = way(session.token)
        closed = await endpoint.ask("POST", path, body, headers=headers)
        endpoint.sessions.end(session)
        ended = await endpoint.ask("POST", path, body, headers=headers)
        calls, others = session.calls, other.calls
    assert found.status == 200
    assert forged.error == (401, None, "invalid_session")
    assert closed.error == ended.error == (410, None, "session_closed")
    assert (len(calls), others) == (1, [])


async def test_what_is_not_a_sessions_needs_no_token(tokenizer):
    async with played(tokenizer, health=lambda: {"engines": 2}) as endpoint:
        session = endpoint.open()
        paths = [
            "/v1/models",
            "/health",
            f"/sessions/{session.token}/v1/models",
            "/sessions/sk-forged/v1/models",
        ]
        models, health, below, forged = [await endpoint.ask("GET", path) for path in paths]
    [card] = models.json["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 4000)
    assert health.json == {"status": "ok", "weight_version": str(VERSION), "sessions": 1, "engines": 2}
    assert below.json == models.json
    assert forged.error[0] == 401


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/inference/v1/generate"])
@pytest.mark.parametrize("prefix", ["", "/sessions/{}", "/ng-rollout/{}"])
async def test_all_calls_are_refused_without_a_token_and_found_below_one(tokenizer, path, prefix):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        body = {**BODY, "prompt": "hi", "token_ids": [5]}
        unknown = await endpoint.ask("POST", prefix.format("sk-unknown") + path, body)
        known = await endpoint.ask("POST", prefix.format(session.token) + path, body, key=session.token)
        wrong = await endpoint.ask("GET", prefix.format(session.token) + path)
        assert (unknown.error, known.status, wrong.error) == (
            (401, None, "invalid_session"),
            200,
            (405, None, None),
        )


async def test_a_session_tells_its_row_and_takes_a_reward_once(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open(sample=3)
        path = f"/sessions/{session.token}"
        await endpoint.chat(session, BODY["messages"])
        before = await endpoint.ask("GET", path)
        closed = await endpoint.ask("POST", f"{path}/close", {"reward": 0.5, "rewards": {"format": 1}})
        after = await endpoint.ask("GET", path)
        again = await endpoint.ask("POST", f"{path}/close", {"reward": 1})
        before, closed, after, again = before.json, closed.json, after.json, again.error
    assert before == {
        "state": "open",
        "calls": 1,
        "sample": 3,
        "prompt": {
            "index": 7,
            "text": "add 1 and 2",
            "answer": "3",
            "messages": [],
            "tools": [],
            "columns": {"level": 2},
        },
    }
    assert closed == {"state": "closed", "calls": 1}
    assert after["state"] == "closed"
    assert again == (410, None, "session_closed")
    assert (session.reward, session.rewards) == (0.5, {"format": 1.0})


async def test_columns_that_json_does_not_know_are_told_as_texts(tokenizer):
    async with played(tokenizer) as endpoint:
        columns = {"day": date(2020, 1, 2), "score": math.nan, "several": [1, {"a": math.inf}]}
        prompt = Prompt(1, "a", "b", columns=columns)
        session = endpoint.sessions.open(prompt, 0, SessionLimits(100, 1), endpoint.model)
        told = await endpoint.ask("GET", f"/sessions/{session.token}")
    found = told.json["prompt"]["columns"]
    assert found == {"day": "2020-01-02", "score": None, "several": [1, {"a": None}]}


WRONG = [
    '{"reward": "1"}',
    '{"reward": true}',
    '{"reward": NaN}',
    '{"rewards": {"a": null}}',
    '{"rewards": 1}',
    "[]",
]


async def test_what_is_no_reward_is_refused_and_the_session_stays_open(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        path = f"/sessions/{session.token}/close"
        wrong = [await endpoint.ask("POST", path, body.encode()) for body in WRONG]
        opened = not session.closed.is_set()
        wrong, closed = [reply.status for reply in wrong], (await endpoint.ask("POST", path)).status
    assert (wrong, opened, closed, session.reward) == ([400] * len(WRONG), True, 200, None)


async def test_a_session_that_is_closed_answers_those_who_wait(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        endpoint.model.answering.clear()
        waiting = asyncio.create_task(endpoint.chat(session, BODY["messages"]))
        await endpoint.model.was_asked(1)
        session.close()
        assert (await waiting).error, endpoint.model.given_up == ((410, None, "session_closed"), 1)


async def test_a_session_that_has_made_its_calls_is_refused(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open(calls=1)
        replies = [await endpoint.chat(session, [*BODY["messages"]] * count) for count in (1, 2)]
        status, error, message = replies[0].status, replies[1].error, replies[1].json["error"]["message"]
    assert (status, error) == (200, (400, None, "session_limit_exceeded"))
    assert "max_tokens" in message  # the word by which clients such as NeMo Gym's end an episode


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (EngineDiedError("it died"), (503, None, "try_again")),
        (RunStoppedError("the end"), (500, None, "engine_failed")),
    ],
    ids=["died", "failed"],
)
async def test_a_dead_engine_has_clients_ask_again_and_nothing_of_it_is_told(tokenizer, error, answered):
    async with played(tokenizer) as endpoint:
        endpoint.model.error = error
        reply = await endpoint.chat(endpoint.open(), BODY["messages"])
    assert reply.error == answered
    assert ("retry-after" in reply.headers) == (answered[0] == 503)
    assert str(error) not in reply.body.decode()


def events(reply):
    lines = reply.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stream_is_one_chunk_and_an_end(tokenizer, path):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        body = {**BODY, "prompt": "hi", "stream": True}
        plain = await endpoint.ask("POST", path, body, key=session.token)
        usage = await endpoint.ask(
            "POST", path, {**body, "stream_options": {"include_usage": True}}, key=session.token
        )
        body["temperature"] = 0.1
        refused = await endpoint.ask("POST", path, body, key=session.token)
    assert plain.headers["content-type"].startswith("text/event-stream")
    first, last = events(plain)
    said = first["choices"][0]
    assert (said["delta"]["content"] if "delta" in said else said["text"]) == "the answer"
    assert (said["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "stop")
    *_, told = events(usage)
    assert (told["choices"], told["usage"]["completion_tokens"]) == ([], 11)
    assert refused.error[0] == 400
