"""Encode messages as a prompt's ids, with the session's earlier answers exactly as sampled.

A returned assistant message is recognized by the conversation before it and by its ids or text. Returned ids and texts
are only compared, never trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
    """The ids in a returned assistant message, for comparison with the session's calls."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chat:
    """A client's conversation. claims: one per message, or None if the message has no ids.

    variables: chat template variables besides the run's. goes_on: True if the client asks to continue the last message.
    """

    messages: tuple[Message, ...]
    claims: tuple[Claim | None, ...]
    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    goes_on: bool = False


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a prompt. state: the conversation's digest. heard: the messages after the last answer.

    begun: an unfinished answer at the end of the prompt, if any. before: the digest of the messages before it.
    """

    ids: list[int]
    state: bytes
    heard: tuple[Message, ...]
    begun: str = ""
    before: bytes | None = None


@dataclass(frozen=True)
class _Answered:
    call: Call
    message: Message  # as sent to the client


@dataclass
class History:
    """A session's chat calls, by the digest of the conversation that each answers."""

    _calls: dict[bytes, list[_Answered]] = field(default_factory=dict[bytes, list[_Answered]])
    _contents: dict[_Said, str] = field(default_factory=dict[_Said, str])
    """Each answer's original content: clients separate the thoughts, which a template may show inside the content."""

    @classmethod
    def of(cls, session: Session) -> History:
        return session.memory.setdefault(_MEMORY, cls())

    def prompt(self, chat: Chat, tokenizer: Tokenizer, room: Room) -> ChatPrompt:
        """Encode a conversation, reusing the ids of its longest sampled prefix.

        Raises ValueError for messages that the template or the tokenizer rejects, and NoRoomError, without encoding,
        for a text whose number of characters alone shows that it is too long.
        """
        fewest = tokenizer.fewest_tokens
        # Templates may leave out an answer's thoughts, but nothing else.
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
        """Record an answer's message as sent, joined with any part already in the prompt; once per call."""
        kept = [(prompt.state, message)]
        if prompt.before is not None:
            kept.append((prompt.before, replace(message, content=prompt.begun + message.content)))
        for state, said in kept:
            known = self._calls.setdefault(state, [])
            if not any(answered.call is call for answered in known):
                known.append(_Answered(call, said))
                self._contents[_said(said)] = said.content

    def _find(self, state: bytes, message: Message, claim: Claim | None) -> _Answered | None:
        """Return the call that produced a returned message; if several match, the last one."""
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
    """Return the thoughts, text and calls (without ids), however the client arranged them."""
    thought, end, words = message.content.partition(_THOUGHT_ENDS)
    if message.reasoning or not end:
        thought, words = message.reasoning, message.content
    thought = thought.strip().removeprefix(_THOUGHT_BEGINS).strip()
    calls = tuple((call.name, json.dumps(call.parsed, sort_keys=True)) for call in message.tool_calls)
    return thought, words.strip(), calls


def flaws_of(message: Message) -> list[str]:
    """Return an answer's flaws, as NeMo RL's nemo_gym environment defines them; its calls are already parsed.

    invalid_tool_call: a call's tag in the text, or in the thought if there is neither text nor call.
    malformed_thinking: a thinking tag in the text, or two of a kind in a thought without text and call.
    """
    thought, words, calls = _said(message)
    if not thought and words.startswith(_THOUGHT_BEGINS):  # cut off within the thought
        thought, words = words.removeprefix(_THOUGHT_BEGINS), ""
    alone = "" if words or calls else thought
    thinking = (_THOUGHT_BEGINS, _THOUGHT_ENDS)
    found = {
        "invalid_tool_call": any(tag in words or tag in alone for tag in _CALL_TAGS),
        "malformed_thinking": any(tag in words or alone.count(tag) > 1 for tag in thinking),
    }
    return [flaw for flaw, is_found in found.items() if is_found]


def _digest(before: bytes, *parts: Any) -> bytes:
    text = json.dumps([before.hex(), *parts])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


_CALL_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
_ID_LENGTH = 9
"""Some templates, such as Mistral's, accept only ids of nine letters and digits."""

type Function = tuple[str, str]
"""A name, and the arguments as JSON."""
type ToolParser = Callable[[str, Sequence[int]], tuple[str, list[Function]]]
"""From an answer's text and ids, without its end token, to the text outside of calls, and the calls in order."""


def no_tools(text: str, _ids: Sequence[int]) -> tuple[str, list[Function]]:
    return text, []


def json_calls(
    text: str, _ids: Sequence[int], *, tag: str = "tool_call", listed: bool = False
) -> tuple[str, list[Function]]:
    """Parse calls between `<tag>` and `</tag>`: a JSON object each, or a list of them if `listed`.

    Anything but objects with a name and an object of arguments stays text, as does an unfinished call.
    """
    calls: list[tuple[re.Match[str], list[Function]]] = []
    for match in re.finditer(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
        try:
            given: object = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        functions: list[Function] = []
        objects = cast("list[object]", given) if listed and isinstance(given, list) else [given]
        for one in objects:
            call = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
            name, arguments = call.get("name"), call.get("arguments", {})
            if isinstance(name, str) and name and isinstance(arguments, dict):
                functions.append((name, json.dumps(arguments, ensure_ascii=False)))
        if functions and len(functions) == len(objects):
            calls.append((match, functions))
    if not calls:
        return text, []
    ends = [0, *(match.end() for match, _ in calls)]
    starts = [*(match.start() for match, _ in calls), len(text)]
    said = [text[end:start].strip() for end, start in zip(ends, starts, strict=True)]
    return "\n".join(filter(None, said)), [one for _, functions in calls for one in functions]


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Return a parser by name: `hermes` (also Qwen's), `nemotron_json`, `none`, or one of `renderers` (extra
    `tool-parsers`).

    Raises ImportError without that library, RefusedError for an unknown name.
    """
    nemotron = partial(json_calls, tag="TOOLCALL", listed=True)
    own: dict[str, ToolParser] = {"hermes": json_calls, "nemotron_json": nemotron, "none": no_tools}
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

    # The few methods of a transformers tokenizer that the library's parsers call.
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
    """Return an answer's function calls, with ids that depend on the sampled tokens alone."""
    drawn, calls = "", list[ToolCall]()
    for ids in (call.prompt_P, call.answer_N):
        drawn += f"{hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()}."
    for place, function in enumerate(functions):
        name = f"{drawn}{call.repetition}.{place}".encode()
        calls.append(ToolCall(hashlib.blake2b(name, digest_size=16).hexdigest()[:_ID_LENGTH], *function))
    return tuple(calls)
