"""Clients of others against the endpoint: OpenAI's, and what verifiers trains with."""

import asyncio
import json
import os
import sys

import pytest
from chat_templates import TOOLS, byte_tokenizer
from doc_pages import blocks
from played_endpoint import MODEL, TOOL, VERSION, calling, played

pytestmark = pytest.mark.needs("endpoint-clients")

USER = {"role": "user", "content": "add 1 and 2"}


def openai_client(endpoint, session):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{endpoint.address.url}/v1", api_key=session.token, max_retries=2)


async def test_the_agent_of_the_page_calls_its_tool_and_closes_its_session(tokenizer, tmp_path):
    [(_, _, code)] = blocks("py")
    (tmp_path / "agent.py").write_text(code, "utf-8")
    texts = {0: calling(a=1, b=2), 1: "3"}
    async with played(tokenizer, lambda prompt: texts[prompt.count("<tool_response>")]) as endpoint:
        session = endpoint.open()
        own = f"{endpoint.address.url}/sessions/{session.token}"
        given = {"OPENAI_BASE_URL": f"{own}/v1", "OPENAI_API_KEY": session.token, "NEMO_RL_SESSION_URL": own}
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, tmp_path / "agent.py"),
            env=os.environ | given, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, failed = await agent.communicate(json.dumps({"messages": [USER], "answer": "3"}).encode())
        assert agent.returncode == 0, failed.decode()
    assert (session.reward, len(session.calls)) == (1.0, 2)


async def test_openais_client_reads_streams_log_probabilities_and_errors(tokenizer):
    from openai import APIStatusError, AuthenticationError, BadRequestError

    async with played(tokenizer) as endpoint:
        session = endpoint.open(context=100)
        async with openai_client(endpoint, session) as client:
            create = client.chat.completions.create
            ask = {"model": MODEL, "messages": [USER]}
            stream = await create(**ask, stream=True, stream_options={"include_usage": True})
            parts = [part async for part in stream]
            raw = await client.chat.completions.with_raw_response.create(
                **ask, logprobs=True, extra_body={"return_token_ids": True}
            )
            for more in ({"messages": [{"role": "user", "content": "x" * 200}]}, {"temperature": 0.3}):
                with pytest.raises(BadRequestError) as refused:
                    await create(**{**ask, **more})
                assert refused.value.code in ("context_length_exceeded", "sampling_differs")
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="sk-forged").chat.completions.create(**ask)
            session.close()
            with pytest.raises(APIStatusError) as closed:
                await create(**ask)
            closed, calls = closed.value.status_code, session.calls
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "the answer"
    assert parts[-1].usage.completion_tokens == 11
    answer = raw.parse()
    assert raw.headers["x-weight-version"] == str(VERSION)
    assert answer.choices[0].token_ids == calls[1].answer_N.tolist()
    assert [one.logprob for one in answer.choices[0].logprobs.content] == calls[1].logprobs_N.tolist()
    assert (closed, len(calls)) == (410, 2)


async def test_openais_client_tries_again_and_gets_the_same_answer(tokenizer):
    """Its connection breaks while the first answer is drawn; what it asks again is asked of the engine once more."""
    async with played(tokenizer) as endpoint:
        session, model = endpoint.open(), endpoint.model
        model.answering.clear()
        async with openai_client(endpoint, session) as client:
            asking = asyncio.create_task(
                client.chat.completions.create(model=MODEL, messages=[USER], timeout=0.3)
            )
            await model.gave_up(1)
            model.answering.set()
            content, [call] = (await asking).choices[0].message.content, session.calls
    assert (content, call.repetition) == ("the answer", 0)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("qwen"), TOOLS, marks=QWEN_MARKS)


QWEN_MARKS = (
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


async def test_the_client_of_verifiers_plays_two_turns_with_a_tool(qwen, tmp_path):
    from openai import AsyncOpenAI
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.client import generate
    from renderers.configs import Qwen3RendererConfig

    qwen.save_as_hugging_face(tmp_path)
    renderer = create_renderer(load_tokenizer(str(tmp_path)), Qwen3RendererConfig())
    texts = {0: f"<think>\none\n</think>\n\n{calling(a=1)}", 1: "three"}
    async with played(qwen, lambda prompt: texts[prompt.count("<tool_response>")]) as endpoint:
        session = endpoint.open()
        client = AsyncOpenAI(base_url=f"{endpoint.address.url}/v1", api_key="EMPTY", max_retries=0)
        sampling = {"temperature": 1.0, "max_tokens": 256}
        asked = {"client": client, "renderer": renderer, "model": MODEL, "tools": [TOOL]}
        asked |= {"sampling_params": sampling, "extra_headers": {"X-Session-ID": session.token}}
        async with client:
            first = await generate(messages=[USER], **asked)
            tail = [{"role": "tool", "tool_call_id": "0", "name": "add", "content": "3"}]
            bridged = renderer.bridge_to_next_turn(
                first["prompt_ids"], first["completion_ids"], tail, tools=[TOOL]
            )
            second = await generate(
                messages=[USER, *tail], prompt_ids=bridged.token_ids, prompt_attribution=bridged, **asked
            )
        calls = session.calls
    [called] = first["tool_calls"]
    assert (called.name, called.arguments) == ("add", {"a": 1})
    for got, call in zip((first, second), calls, strict=True):
        assert got["completion_ids"] == call.answer_N.tolist()
        assert got["completion_logprobs"] == call.logprobs_N.tolist()
    assert calls[1].ids[: len(calls[0].ids)] == calls[0].ids
    assert "<tool_response>\n3\n</tool_response>" in qwen.text_of(calls[1].prompt_P.tolist())
    assert "tool_response" in calls[1].heard[0].content
    assert "add 1 and 2" not in calls[1].heard[0].content
