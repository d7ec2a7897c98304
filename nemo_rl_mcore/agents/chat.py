"""From messages to the ids of a prompt, with the session's answers as they were sampled.

An assistant's message that comes back is recognized by the conversation before it, and by its ids or its text; neither
ids nor texts that come back are trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

from nemo_rl_mcore.agents.session import Call, Room, Session
from nemo_rl_mcore.data.chat import ASSISTANT, Conversation
from nemo_rl_mcore.data.messages import Message, ToolCall
from nemo_rl_mcore.data.tokenizer import Tokenizer, Tools
from nemo_rl_mcore.errors import RefusedError

_MEMORY = "chat"
type _Said = tuple[str, str, tuple[tuple[str, str], ...]]
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


@dataclass(frozen=True)
class Claim:
    """The ids that an assistant's message brings along; they are compared with those of the session's calls."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chat:
    """A conversation as a client sends it. claims: one for each message, None where it brings no ids.

    variables: of the chat template, besides those of the run. goes_on: the client says that the answer goes on with
    the last message.
    """

    messages: tuple[Message, ...]
    claims: tuple[Claim | None, ...]
    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    goes_on: bool = False


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt that a conversation is. state: stands for all of it; heard: what is said after the last answer.

    begun: what it ends with of the answer; before: stands for all before that.
    """

    ids: list[int]
    state: bytes
    heard: tuple[Message, ...]
    begun: str = ""
    before: bytes | None = None


@dataclass(frozen=True)
class _Answered:
    call: Call
    message: Message  # as it was returned


@dataclass
class History:
    """The chat calls of a session, by the conversation that each has answered."""

    _calls: dict[bytes, list[_Answered]] = field(default_factory=dict[bytes, list[_Answered]])
    _contents: dict[_Said, str] = field(default_factory=dict[_Said, str])
    """Of all answers: clients take thoughts apart from what is said, where a template may show them together."""

    @classmethod
    def of(cls, session: Session) -> History:
        return session.memory.setdefault(_MEMORY, cls())

    def prompt(self, chat: Chat, tokenizer: Tokenizer, room: Room) -> ChatPrompt:
        """Encode what the template shows of a conversation, after the longest beginning that was sampled.

        Raises ValueError for what the template or the tokenizer does not take, and NoRoomError for a text that is too
        long by its length alone: it is not encoded.
        """
        fewest = tokenizer.fewest_tokens
        # Of an answer a template may leave the thoughts out; all else it shows.
        room(fewest(sum(len(message.content) for message in chat.messages if message.role != ASSISTANT)))
        messages, answered = [*chat.messages], dict[int, Call]()
        if chat.variables:
            tokenizer = tokenizer.with_variables(chat.variables)
        before = state = _digest(b"", [*chat.tools], {**chat.variables})
        for place, (message, claim) in enumerate(zip(chat.messages, chat.claims, strict=True)):
            found = self._find(state, message, claim) if message.role == ASSISTANT else None
            if found is not None:
                messages[place], answered[place] = found.message, found.call
            elif message.role == ASSISTANT and (content := self._contents.get(_said(message))) is not None:
                messages[place] = replace(message, content=content, reasoning="")
            before = state
            said = asdict(replace(messages[place], frame=(0, 0), null=False))
            state = _digest(state, said, found and [found.call.digest, found.call.repetition])
        last, own = messages[-1], answered.get(len(messages) - 1)
        begun = last.role == ASSISTANT and not last.tool_calls
        begun = begun and (chat.goes_on or own is None or not own.finished)
        conversation = Conversation(tokenizer, messages, chat.tools, begun)
        room(fewest(len(conversation.shown.text)))
        ids, heard = None, ()
        if begun and own is not None and not own.finished:
            ids = own.ids
        for place, call in reversed(answered.items()):
            if ids is None and (behind := conversation.ids_behind(place, call.answer_N.tolist())) is not None:
                ids, heard = [*call.ids, *behind], tuple(messages[place + 1 :])
        if ids is None:
            shown = conversation.shown
            ids, heard = tokenizer.encode(shown.text, shown.literal), tuple(messages)
        return ChatPrompt(ids, state, heard, *((last.content, before) if begun else ("", None)))

    def keep(self, prompt: ChatPrompt, call: Call, message: Message) -> None:
        """Take note of how an answer is returned, and of a whole one that began in its prompt; once for each call."""
        kept = [(prompt.state, message)]
        if prompt.before is not None:
            kept.append((prompt.before, replace(message, content=prompt.begun + message.content)))
        for state, said in kept:
            known = self._calls.setdefault(state, [])
            if not any(answered.call is call for answered in known):
                known.append(_Answered(call, said))
                self._contents[_said(said)] = said.content

    def _find(self, state: bytes, message: Message, claim: Claim | None) -> _Answered | None:
        """Return the answer to a conversation that a message is; of equal ones that to the last repetition."""
        known = sorted(self._calls.get(state, ()), key=lambda answered: -answered.call.repetition)
        if claim is not None:
            for one in known:
                prompt_P, answer_ids = one.call.prompt_P, tuple(one.call.answer_N.tolist())
                if len(claim.prompt_ids) != len(prompt_P) or claim.answer_ids != answer_ids:
                    continue
                if claim.prompt_ids == tuple(prompt_P.tolist()):
                    return one
        said = _said(message)
        return next((one for one in known if _said(one.message) == said), None)


def _said(message: Message) -> _Said:
    """Return thought, words and calls, however a client has arranged them, but for the ids that it calls them by."""
    thought, end, words = message.content.partition(_THOUGHT_ENDS)
    if message.reasoning or not end:
        thought, words = message.reasoning, message.content
    thought = thought.strip().removeprefix(_THOUGHT_BEGINS).strip()
    calls = tuple((call.name, json.dumps(call.parsed, sort_keys=True)) for call in message.tool_calls)
    return thought, words.strip(), calls


def _digest(before: bytes, *parts: Any) -> bytes:
    text = json.dumps([before.hex(), *parts])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ID_LENGTH = 9
"""Some templates, such as Mistral's, take ids of nine letters and digits alone."""

type Function = tuple[str, str]
"""A name, and the arguments as JSON."""
type ToolParser = Callable[[str, Sequence[int]], tuple[str, list[Function]]]
"""From an answer's text and ids, without the token that ended it, to its text besides calls, and its calls in order."""


def no_tools(text: str, _ids: Sequence[int]) -> tuple[str, list[Function]]:
    return text, []


def hermes(text: str, _ids: Sequence[int]) -> tuple[str, list[Function]]:
    """Read calls as Hermes and Qwen write them: a JSON object between `<tool_call>` and `</tool_call>`.

    What is no object with a name, and arguments that are an object, stays text; so does a call that is not ended.
    """
    calls: list[tuple[re.Match[str], Function]] = []
    for match in _CALL.finditer(text):
        try:
            given: object = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        call = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str) and name and isinstance(arguments, dict):
            calls.append((match, (name, json.dumps(arguments, ensure_ascii=False))))
    if not calls:
        return text, []
    ends = [0, *(match.end() for match, _ in calls)]
    starts = [*(match.start() for match, _ in calls), len(text)]
    said = [text[end:start].strip() for end, start in zip(ends, starts, strict=True)]
    return "\n".join(filter(None, said)), [function for _, function in calls]


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Return a parser by its name: `hermes`, `none`, or one of the library `renderers` (the extra `tool-parsers`).

    Raises ImportError where that is not installed, RefusedError for an unknown name.
    """
    own: dict[str, ToolParser] = {"hermes": hermes, "none": no_tools}
    if name in own:
        return own[name]
    library = import_module("renderers.parsers")
    known: list[str] = [*library.TOOL_PARSERS]
    if name not in known:
        allowed = ", ".join((*own, *known))
        raise RefusedError(f"tool_parser {name!r} is none of {allowed}", code="unknown-tool-parser")

    def id_of(token: str) -> int | None:
        ids = tokenizer.encode(token)
        return ids[0] if len(ids) == 1 else None

    # The few methods of a tokenizer of transformers that the library's parsers call.
    asked = SimpleNamespace(
        unk_token_id=None,
        convert_tokens_to_ids=id_of,
        decode=lambda ids, **_: tokenizer.text_of(ids),  # type: ignore[reportUnknownLambdaType]
    )
    parser = library.get_tool_parser(name, asked)

    def by_renderers(text: str, ids: Sequence[int]) -> tuple[str, list[Function]]:
        said, found = parser.extract([*ids])
        calls = [call for call in found if call.name and isinstance(call.arguments, dict)]
        if len(calls) < len(found) or not calls:
            return text, []
        functions = [(str(call.name), json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
        return tokenizer.text_of(said).strip(), functions

    return by_renderers


def calls_of(call: Call, functions: Sequence[Function]) -> tuple[ToolCall, ...]:
    """Return the functions that an answer calls, with ids that are the same whenever the same tokens are drawn."""
    drawn = f"{_hash_of(call.prompt_P.tobytes())}.{_hash_of(call.answer_N.tobytes())}.{call.repetition}"
    return tuple(
        ToolCall(_hash_of(f"{drawn}.{place}".encode())[:_ID_LENGTH], *function)
        for place, function in enumerate(functions)
    )


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
