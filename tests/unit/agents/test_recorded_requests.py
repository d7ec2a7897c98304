"""Requests in the form in which harnesses send them, each behind the answer to the one before.

What was random when they were sent, ids and tokens, stands there by name: $TOKEN, $CALL_ID, $PROMPT_IDS.
"""

import asyncio
import json
from pathlib import Path

import pytest
from played_endpoint import calling, played

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
