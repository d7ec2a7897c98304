"""Answers in the shapes that clients of OpenAI, vLLM, NeMo Gym and verifiers read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from nemo_rl_mcore.agents.options import EndpointOptions
from nemo_rl_mcore.agents.requests import Wishes
from nemo_rl_mcore.agents.session import Call
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.tokenizer import token_texts

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """A call of the model, and what its client has asked for."""

    call: Call
    wishes: Wishes
    options: EndpointOptions

    @property
    def ids(self) -> list[int]:
        """Return the ids of the answer."""
        return self.call.answer_N.tolist()

    @property
    def spoken_ids(self) -> list[int]:
        """Return them without the one that has ended the answer."""
        ids = self.ids
        return ids[:-1] if ids and ids[-1] in self._ends else ids

    @property
    def text(self) -> str:
        """Return the text up to the first of the request's own stop texts; those of the run belong to the answer."""
        text = self.options.tokenizer.text_of(self.spoken_ids)
        return text[: min((text.find(stop) for stop in self.wishes.stop if stop in text), default=len(text))]

    @property
    def finish_reason(self) -> str:
        """Return why it ended: stop or length."""
        return "stop" if self.call.finished else "length"

    @property
    def logprobs(self) -> list[float]:
        """Return those of the sampled tokens, to the bit."""
        return self.call.logprobs_N.tolist()

    @property
    def versions(self) -> list[dict[str, Any]]:
        """Return which weights have drawn which tokens, as vLLM says it."""
        versions_N = self.call.versions_N
        if versions_N is None:
            return [{"version": str(self.options.version()), "start": 0, "end": len(self.ids)}]
        spans, start = list[dict[str, Any]](), 0
        for version, tokens in groupby(versions_N.tolist()):
            end = start + len([*tokens])
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return spans

    @property
    def version(self) -> str:
        """Return that of the weights that sampled the last token."""
        return self.versions[-1]["version"] if self.versions else str(self.options.version())

    @property
    def name(self) -> str:
        """Return what the answer is called: the same whenever the same tokens are drawn."""
        return f"{self.call.digest & (1 << 64) - 1:016x}-{self.call.number}"

    @property
    def _ends(self) -> frozenset[int]:
        return self.options.sampling.stop_ids | self.wishes.stop_ids

    def of_chat(self, message: Message) -> dict[str, Any]:
        """Return a chat completion."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        said: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not calls else None,
            **({"tool_calls": calls} if calls else {}),
            "prompt_token_ids": self.call.prompt_P.tolist(),
            "generation_token_ids": self.ids,
            "generation_log_probs": self.logprobs,
            "weight_versions": self.versions,
        }
        reason = "tool_calls" if calls and self.call.finished else self.finish_reason
        shown = {"content": self._logprobs()} if self.wishes.logprobs else None
        choice = self._choice(reason, shown) | {"message": said}
        return self._whole("chatcmpl", "chat.completion", choice)

    def of_completion(self) -> dict[str, Any]:
        """Return a text completion."""
        shown = None
        if self.wishes.logprobs:
            names = self._token_names()
            shown = {
                "tokens": names,
                "token_logprobs": self.logprobs,
                "text_offset": [*accumulate(map(len, names[:-1]), initial=0)] if names else [],
                "top_logprobs": [{name: one} for name, one in zip(names, self.logprobs, strict=True)],
            }
        choice = self._choice(self.finish_reason, shown) | {"text": self.text}
        return self._whole("cmpl", "text_completion", choice)

    def of_generation(self) -> dict[str, Any]:
        """Return a generation, ids in and ids out: its tokens are called as vLLM does and as verifiers does."""
        content: list[dict[str, Any]] = [
            {
                "token": f"token_id:{token}",
                "token_id": token,
                "logprob": one,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, one in zip(self.ids, self.logprobs, strict=True)
        ]
        choice = self._choice(self.finish_reason, {"content": content}) | {"token_ids": self.ids}
        return {"request_id": f"gen-{self.name}", "choices": [choice], "weight_version": self.version}

    def _choice(self, reason: str, shown: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": reason, "logprobs": shown, "weight_versions": self.versions}
        return choice | ({"token_ids": self.ids} if self.wishes.token_ids else {})

    def _whole(self, prefix: str, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        asked = self.call.prompt_P.tolist()
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": int(time.time()),
            "model": self.options.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(asked),
                "completion_tokens": len(self.ids),
                "total_tokens": len(asked) + len(self.ids),
            },
            **({"prompt_token_ids": asked} if self.wishes.token_ids else {}),
        }

    def _logprobs(self) -> list[dict[str, Any]]:
        spelt = not self.wishes.names_ids
        return [
            {"token": name, "logprob": one, "bytes": [*name.encode()] if spelt else None, "top_logprobs": []}
            for name, one in zip(self._token_names(), self.logprobs, strict=True)
        ]

    def _token_names(self) -> list[str]:
        if self.wishes.names_ids:
            return [f"token_id:{token}" for token in self.ids]
        return token_texts(self.options.tokenizer, self.ids)


def events_of(whole: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """Yield an answer as a stream: one chunk of all that it says, an end, and the usage where it is asked for."""
    [choice] = whole["choices"]
    kind = whole["object"]
    base = {key: whole[key] for key in ("id", "created", "model")}
    base["object"] = f"{kind}.chunk" if kind == "chat.completion" else kind
    first, last = dict(choice), {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    first["finish_reason"] = None
    if "message" in first:
        delta = dict(first.pop("message"))
        delta["content"] = delta["content"] or ""
        if "tool_calls" in delta:
            delta["tool_calls"] = [call | {"index": place} for place, call in enumerate(delta["tool_calls"])]
        first["delta"], last["delta"] = delta, {}
    else:
        last["text"] = ""
    chunks: list[dict[str, Any]] = [{"choices": [first]}, {"choices": [last]}]
    if include_usage:
        chunks.append({"choices": [], "usage": whole["usage"]})
    for chunk in chunks:
        yield b"data: " + to_json(base | chunk) + b"\n\n"
    yield _DONE


def to_json(value: object) -> bytes:
    """Return JSON that any client reads: numbers are finite, and letters beyond ASCII are spelt as escapes."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def plain(value: object) -> Any:
    """Return what JSON can say of a value of a data set: dates and such as texts, what is no number as null."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


def tokenized(ids: list[int], options: EndpointOptions) -> dict[str, Any]:
    """Return the ids of a prompt."""
    return {"count": len(ids), "max_model_len": options.context, "tokens": ids}


def models(options: EndpointOptions) -> dict[str, Any]:
    """Return the one model that there is."""
    card = {"id": options.model, "object": "model", "created": 0, "owned_by": "nemo_rl_mcore"}
    return {"object": "list", "data": [card | {"max_model_len": options.context}]}
