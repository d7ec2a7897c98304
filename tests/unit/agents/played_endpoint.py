"""The endpoint on a real socket, in front of a model that says what it is told to, and clients for it."""

import asyncio
import copy
import hashlib
import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from nemo_rl_mcore.agents.app import make_app
from nemo_rl_mcore.agents.chat import json_calls
from nemo_rl_mcore.agents.requests import EndpointOptions, RunSampling
from nemo_rl_mcore.agents.server import ServerLimits, served
from nemo_rl_mcore.agents.session import SessionLimits, Sessions
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import digests_of_rows
from nemo_rl_mcore.data.datasets import Prompt

MODEL = "policy"
VERSION = 12
LONGEST = 400
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def spelt(tokenizer, text):
    """Ids of a text as its tokenizer would not write it: letter by letter, but for special tokens."""
    marks = "|".join(map(re.escape, tokenizer.special_tokens))
    pieces = re.findall(f"{marks}|(?s:.)", text)
    return [token for piece in pieces for token in tokenizer.encode(piece)]


def calling(**arguments):
    """What an answer says to call the tool."""
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


@dataclass
class FakeModel:
    """Keeps `Respond`: says what `script` makes of the text of a prompt, in tokens of single letters, and then ends.

    Log-probabilities are those of a hash of all that the noise depends on; the weights change after each `per_version`
    tokens.
    """

    tokenizer: object
    script: Callable[[str], str] = lambda prompt: "the answer"
    per_version: int = 1000
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether answers are given; they are, unless a test clears it."""
    error: Exception | None = None
    asked: list[BatchedDataDict] = field(default_factory=list)
    given_up: int = 0

    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self):
        self.answering.set()

    async def was_asked(self, times):
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= times)

    async def gave_up(self, times):
        async with self.changed:
            await self.changed.wait_for(lambda: self.given_up >= times)

    async def __call__(self, data):
        self.asked.append(data)
        async with self.changed:
            self.changed.notify_all()
        try:
            await self.answering.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            async with self.changed:
                self.changed.notify_all()
            raise
        if self.error is not None:
            raise self.error
        text = self.script(self.tokenizer.text_of(data["input_ids"][0].tolist()))
        stops = data.get("stop_strings", [()])[0]
        for stop in stops:
            text = text[: text.find(stop) + len(stop)] if stop in text else text
        ended = not any(stop in text for stop in stops)
        ids = spelt(self.tokenizer, text) + [self.tokenizer.eos_token_id] * ended
        finished, ids = len(ids) <= LONGEST, ids[:LONGEST]
        tokens, lengths = torch.tensor([ids]), torch.tensor([len(ids)])
        names = ("prompt_index", "sample_index", "turn_index")
        key = " ".join(str(int(data[name])) for name in names).encode()
        draws = [hashlib.blake2b(key + bytes([i % 256]), digest_size=4).digest() for i in range(len(ids))]
        return BatchedDataDict(
            tokens=tokens,
            logprobs=-torch.tensor([[int.from_bytes(draw) / 2**32 for draw in draws]]),
            lengths=lengths,
            finished=torch.tensor([finished]),
            digests=digests_of_rows(tokens, lengths),
            weight_versions=VERSION + torch.arange(len(ids))[None] // self.per_version,
        )


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """Status, parameter and code of a refusal; its shape is checked."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return self.status, error["param"], error["code"]

    @property
    def message(self):
        return self.json["choices"][0]["message"]


async def read_reply(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return Reply(int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"])))


def request_of(method, path, body=None, headers=None):
    text = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + text


@dataclass
class Played:
    """A running endpoint."""

    sessions: Sessions
    model: FakeModel
    options: EndpointOptions
    address: object
    failures: list

    def open(self, *, index=7, sample=0, context=4000, calls=100):
        prompt = Prompt(index, "add 1 and 2", "3", columns={"level": 2})
        return self.sessions.open(prompt, sample, SessionLimits(context, calls), self.model)

    @asynccontextmanager
    async def connected(self):
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, method, path, body=None, *, key=None, headers=None):
        """One request on a connection of its own."""
        more = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        async with self.connected() as (reader, writer):
            writer.write(request_of(method, path, body, more))
            return await read_reply(reader)

    async def chat(self, session, messages, *, headers=None, **fields):
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.ask(
            "POST", "/v1/chat/completions", body, key=getattr(session, "token", session), headers=headers
        )


def options_for(tokenizer, failures, **others):
    sampling = RunSampling(
        1.0, 0.9, None, LONGEST, stop_ids=frozenset({tokenizer.eos_token_id}), **others.pop("sampling", {})
    )
    return EndpointOptions(
        MODEL,
        4000,
        tokenizer,
        sampling,
        json_calls,
        version=lambda: VERSION,
        failed=failures.append,
        **others,
    )


@asynccontextmanager
async def played(tokenizer, script=None, *, limits=None, **others):
    """Serve it; that nothing of ours has failed is checked at the end."""
    failures = []
    options = options_for(tokenizer, failures, **others)
    model, sessions = FakeModel(tokenizer), Sessions()
    model.script = script or model.script
    async with served(
        make_app(sessions, options), limits=limits or ServerLimits(stop_seconds=0.5)
    ) as address:
        yield Played(sessions, model, options, address, failures)
    assert failures == []


def gym(message):
    """An answer as NeMo Gym sends it back: thoughts apart, the three lists of ids along."""
    thought, end, words = (message["content"] or "").partition("</think>")
    back = {**message, "content": words if end else message["content"] or ""}
    back.pop("weight_versions", None)
    if end:
        back["reasoning_content"] = back["reasoning"] = thought.removeprefix("<think>")
    return back


def sdk(message):
    """An answer as most harnesses send it back: content and calls alone."""
    kept = copy.deepcopy({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
    return kept if kept["content"] else {**kept, "content": None}


def parts(message):
    """An answer in parts, its arguments spelt in another way."""
    back = sdk(message)
    back["content"] = [{"type": "text", "text": back["content"] or ""}]
    for call in back.get("tool_calls", []):
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
    return back
