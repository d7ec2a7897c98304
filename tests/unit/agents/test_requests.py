"""What bodies may say: the run's sampling or none, and refusals by name in the shape that clients know."""

import asyncio
import json
import math
import random
from datetime import date

import pytest
import yaml
from played_endpoint import LONGEST, MODEL, TOOL, VERSION, played

from nemo_rl_mcore.agents.session import SessionLimits
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.errors import RunStoppedError

USER = {"role": "user", "content": "add 1 and 2"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def statuses(tokenizer, bodies, path="/v1/chat/completions"):
    async def play():
        async with played(tokenizer) as endpoint:
            session = endpoint.open()
            replies = [await endpoint.ask("POST", path, body, key=session.token) for body in bodies]
            assert len(session.calls) == sum(reply.status == 200 for reply in replies)
            return replies

    return run(play())


TAKEN = [
    {"temperature": 1, "top_p": 0.9, "top_k": -1},
    {"temperature": 1.0, "top_p": None, "top_k": 0},
    {"n": 1, "seed": None, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}},
    {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "tools": [TOOL],
        "parallel_tool_calls": True,
    },
    {"max_tokens": LONGEST * 10, "max_completion_tokens": None, "stop": None},
    {"anything": {"else": [1, 2]}, "metadata": {}, "user": "me", "store": False, "stream": False},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": part} for part in "ab"]}]},
]


@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: next(iter(fields)))
def test_the_runs_own_values_neutral_ones_and_unknown_fields_pass(tokenizer, fields):
    [reply] = statuses(tokenizer, [{"messages": [USER], **fields}])
    assert reply.status == 200, reply.body


DIFFERENT = {"temperature": 0.7, "top_p": 1.0, "top_k": 20}
UNSUPPORTED = {
    "n": 2,
    "seed": 1234,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
}
UNSUPPORTED |= {"min_p": 0.1, "min_tokens": 5, "top_logprobs": 3, "response_format": {"type": "json_object"}}
UNSUPPORTED |= {"logit_bias": {"5": 10}, "tool_choice": "required", "ignore_eos": True, "echo": True}
UNSUPPORTED |= {"continue_final_message": True, "logprobs": 5}
MALFORMED = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0]"),
    ({"messages": [USER], "tools": {}}, "tools"),
    ({"messages": [USER], "temperature": "hot"}, "temperature"),
    ({"messages": [USER], "temperature": True}, "temperature"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"messages": [USER], "stop": [""]}, "stop"),
    ({"messages": [USER], "stop": ["a"] * 17}, "stop"),
    ({"messages": [USER], "stream": "yes"}, "stream"),
    ({"messages": [USER], "stop_token_ids": [-1]}, "stop_token_ids"),
]


BODIES = [
    b"",
    b"no JSON",
    b"[]",
    b'"text"',
    b"\xff\xfe\xff",
    b'{"messages": [' + b"[" * 100_000,
    b'{"temperature": NaN}',
    b'{"temperature": 1e999}',
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "a", "model": "b"}',
]
REFUSED = [
    *(
        ({"messages": [USER], name: given}, (400, name, "sampling_differs"))
        for name, given in DIFFERENT.items()
    ),
    *(
        ({"messages": [USER], name: given}, (400, name, "unsupported_parameter"))
        for name, given in UNSUPPORTED.items()
    ),
    *((body, (400, place)) for body, place in MALFORMED),
    *((body, (400,)) for body in BODIES),
    *(
        ({"messages": [{"role": "user", "content": content}]}, (400, "messages", None))
        for content in ("\ud800", "<|im_end|>\ud800")
    ),
    ({"model": "judge", "messages": [USER]}, (404, "model", "model_not_found")),
]


def test_another_sampling_and_what_is_unknown_or_malformed_is_refused_with_its_place(tokenizer):
    replies = statuses(tokenizer, [body for body, _ in REFUSED])
    assert [reply.error[: len(error)] for reply, (_, error) in zip(replies, REFUSED, strict=True)] == [
        error for _, error in REFUSED
    ]


@pytest.mark.parametrize("depth", [300, 3000])
def test_what_is_nested_deeply_is_refused_or_answered(tokenizer, depth):
    nested = '{"a": ' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {nested}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{tool}]}}'
    role = f'{{"messages": [{{"role": {nested}}}]}}'
    taken, refused = statuses(tokenizer, [body.encode(), role.encode()])
    assert taken.status == (200 if depth == 300 else 400)
    assert refused.error[0] == 400


def test_completions_take_texts_and_ids(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi")
    prompts = [ids, [ids], "<|im_start|>user\nhi", ["<|im_start|>user\nhi"]]
    replies = statuses(tokenizer, [{"prompt": one, "logprobs": 1} for one in prompts], "/v1/completions")
    for reply in replies:
        choice = reply.json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("the answer", "stop")
        assert reply.json["usage"]["prompt_tokens"] == len(ids)
        assert "".join(choice["logprobs"]["tokens"]) == "the answer<|im_end|>"
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["text_offset"])
    wrong = [[], None, 5, ["a", "b"], [ids, ids], [tokenizer.vocab_size], [True], [-1], {"a": 1}]
    refused = statuses(tokenizer, [{"prompt": one} for one in wrong], "/v1/completions")
    assert [reply.error[:2] for reply in refused] == [(400, "prompt")] * len(wrong)


def test_generations_take_ids_and_name_tokens_in_both_ways(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi")
    space = tokenizer.encode(" ")[0]
    wanted = {
        "temperature": 1.0,
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 4,
    }
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    bodies = [
        {"model": MODEL, "token_ids": ids, "sampling_params": {**wanted, "stop_token_ids": ends}},
        {"model": MODEL, "token_ids": ids, "sampling_params": {**wanted, "stop_token_ids": [space]}},
        {"model": MODEL, "token_ids": ids, "sampling_params": {"max_tokens": 2}},
    ]
    whole, stopped, cut = (
        reply.json["choices"][0] for reply in statuses(tokenizer, bodies, "/inference/v1/generate")
    )
    assert tokenizer.text_of(whole["token_ids"]) == "the answer<|im_end|>"
    assert (tokenizer.text_of(stopped["token_ids"]), stopped["finish_reason"]) == ("the ", "stop")
    assert (tokenizer.text_of(cut["token_ids"]), cut["finish_reason"]) == ("th", "length")
    for choice in (whole, stopped, cut):
        content = choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    wrong = [{"token_ids": []}, {}, {"token_ids": [1], "sampling_params": {"n": 4}}, {"token_ids": ["1"]}]
    refused = statuses(tokenizer, wrong, "/inference/v1/generate")
    assert [reply.error[:2] for reply in refused] == [
        (400, "prompt"),
        (400, "token_ids"),
        (400, "n"),
        (400, "token_ids"),
    ]


async def test_tokenize_tells_the_ids_that_a_call_would_ask_with(tokenizer):
    async with played(tokenizer) as endpoint:
        session = endpoint.open()
        said = (await endpoint.chat(session, [USER])).message
        messages = [USER, {"role": "assistant", "content": said["content"]}, USER]
        told = await endpoint.ask("POST", "/tokenize", {"messages": messages}, key=session.token)
        asked = await endpoint.chat(session, messages)
        text = await endpoint.ask("POST", "/tokenize", {"prompt": "hi<|im_end|>"}, key=session.token)
        told, asked, text = told.json, asked.message["prompt_token_ids"], text.json
    assert told["tokens"] == asked
    assert (told["count"], told["max_model_len"]) == (len(asked), 4000)
    assert text["tokens"] == tokenizer.encode("hi<|im_end|>")


ODD = [
    *(None, True, 0, -1, 1.5, 10**400, "", "a", "\ud800", "<|im_end|>"),
    *([], [1], [None], {}, {"a": []}, [[[]]]),
]
WHOLE = {"model": MODEL, "messages": [], "tools": [TOOL]} | yaml.safe_load("""
messages:
- {role: system, content: [{type: text, text: a}]}
- {role: user, content: add 1 and 2}
- {role: assistant, content: b, reasoning_content: c,
   tool_calls: [{id: d, type: function, function: {name: add, arguments: '{"a": 1}'}}],
   prompt_token_ids: [1], generation_token_ids: [2]}
- {role: tool, tool_call_id: d, name: add, content: '3'}
prompt: [5, 6]
token_ids: [5, 6]
sampling_params: {temperature: 1.0, stop_token_ids: [1], logprobs: 1}
stop: [a]
max_tokens: 5
stream: false
stream_options: {include_usage: true}
temperature: 1.0
top_p: 0.9
top_k: -1
logprobs: true
reward: 1.0
rewards: {a: 1}
""")


def changed(value, draws):
    """A value in which something, somewhere, is odd."""
    if not isinstance(value, dict | list) or not value or draws.random() < 0.2:
        return draws.choice(ODD)
    places = [*value] if isinstance(value, dict) else range(len(value))
    place = draws.choice(places)
    copy = value.copy()
    copy[place] = changed(value[place], draws)
    return copy


async def test_no_odd_body_is_more_than_refused(tokenizer):
    """And nothing in the endpoint fails on it."""
    draws = random.Random(0)
    paths = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize", "/close"]
    async with played(tokenizer) as endpoint:
        found = []
        for _ in range(400):
            session, path = endpoint.open(), draws.choice(paths)
            body = changed(WHOLE, draws)
            reply = await endpoint.ask("POST", f"/sessions/{session.token}{path}", body)
            found.append(reply.status)
            assert reply.status == 200 or reply.error[0] in (400, 404), (path, body, reply.body)
            endpoint.sessions.end(session)
    assert min(found.count(status) for status in (200, 400)) > 50


BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


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
