"""A conversation's messages, and texts with the spans of special tokens spelled out in content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, cast

from nemo_rl_mcore.errors import RefusedError

type Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A function call in an answer. arguments: a JSON object, or whatever text the model wrote instead."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | str:
        """The arguments for chat templates: an object if the text is one."""
        try:
            found: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return cast("dict[str, Any]", found) if isinstance(found, dict) else self.arguments


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Numbers of characters at the start and end that come from the recipe's own files; the rest is content."""
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's function calls."""
    tool_call_id: str = ""
    """The call that a tool message answers."""
    name: str = ""
    """The speaker's name, such as a tool's."""
    reasoning: str = ""
    """An assistant's thoughts, if they are separate from the content."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False, repr=False)
    """Further fields, passed to the chat template unchanged."""
    null: bool = field(default=False, compare=False, repr=False)
    """The content is null, which some templates distinguish from empty."""
    trained: bool = field(default=True, compare=False, repr=False)
    """False for an assistant message that is shown but not trained on."""

    def with_texts(self, change: Callable[[str], str]) -> Message:
        """Apply `change` to every text outside the frame, including strings in call arguments."""
        calls = list[ToolCall]()
        for call in self.tool_calls:
            changed = with_strings(call.parsed, change)
            arguments = changed if isinstance(changed, str) else json.dumps(changed, ensure_ascii=False)
            calls.append(ToolCall(change(call.id), change(call.name), arguments))
        start, end = self.frame[0], len(self.content) - self.frame[1]
        return replace(
            self,
            role=change(self.role),
            content=f"{self.content[:start]}{change(self.content[start:end])}{self.content[end:]}",
            tool_calls=tuple(calls),
            tool_call_id=change(self.tool_call_id),
            name=change(self.name),
            reasoning=change(self.reasoning),
            more=with_strings({**self.more}, change),
        )

    def fields(self, *, parsed: bool) -> dict[str, Any]:
        """Return the non-empty fields in OpenAI's format; parsed: give arguments as objects, for chat templates."""
        shown: dict[str, Any] = {"role": self.role, "content": None if self.null else self.content}
        calls = list[dict[str, Any]]()
        for call in self.tool_calls:
            function = {"name": call.name, "arguments": call.parsed if parsed else call.arguments}
            calls.append({**({"id": call.id} if call.id else {}), "type": "function", "function": function})
        if calls:
            shown["tool_calls"] = calls
        more = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return {**self.more, **shown, **{key: value for key, value in more.items() if value}}


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in a JSON value, including object keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {change(name): with_strings(held, change) for name, held in items}
    if isinstance(value, list):
        return [with_strings(held, change) for held in cast("list[Any]", value)]
    return value


type Context = str | Sequence[Message]
"""A question: a text or a conversation."""


class MessageError(RefusedError):
    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}", code="message-field")
        self.path = path


_READ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "weight")


def read_message(given: object, path: str) -> Message:
    """Read a message in OpenAI's format; null fields count as missing. Raises MessageError."""
    if not isinstance(given, Mapping):
        raise MessageError(path, "must be an object")
    said = cast("Mapping[str, Any]", given)
    role, content, weight = said.get("role"), said.get("content"), cast("object", said.get("weight"))
    if not isinstance(role, str):
        raise MessageError(f"{path}.role", f"must be text, got {role!r:.100}")
    calls = cast("list[object]", _of_type(said, "tool_calls", list, path) or [])
    if calls and role != "assistant":
        raise MessageError(f"{path}.tool_calls", "is of another role, and an assistant alone calls tools")
    message = Message(
        role,
        _text(content, f"{path}.content"),
        tool_calls=tuple(_tool_call(call, f"{path}.tool_calls[{place}]") for place, call in enumerate(calls)),
        tool_call_id=_of_type(said, "tool_call_id", str, path) or "",
        name=_of_type(said, "name", str, path) or "",
        reasoning=_of_type(said, "reasoning_content", str, path) or "",
        more={key: value for key, value in said.items() if key not in _READ and value is not None},
        null=content is None,
        trained=weight != 0,
    )
    if weight is not None and weight not in (0, 1):
        raise MessageError(f"{path}.weight", f"is {weight!r:.100}, and may be 0 or 1")
    if weight and role != "assistant":
        what = f"is {weight!r:.100} of role {role!r:.100}, and an assistant's alone are trained on"
        raise MessageError(f"{path}.weight", what)
    return message


def read_row_message(given: object, path: str) -> Message:
    """Read a message from a data row; only an assistant's content may be null, and only if other fields are set."""
    message, wrong = read_message(given, path), ""
    if message.null and message == Message(message.role, ""):
        wrong = "is null or missing, and the message has nothing else"
    elif message.null and message.role != "assistant":
        wrong = "is null or missing, which it may be of an assistant alone"
    if wrong:
        raise MessageError(f"{path}.content", wrong)
    return message


def _text(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise MessageError(path, "must be a text, or a list of parts")
    texts = [as_object(part).get("text") for part in cast("list[object]", content)]
    if not all(isinstance(text, str) for text in texts):
        raise MessageError(path, "may have parts of text alone")
    return "".join(map(str, texts))


def _tool_call(given: object, path: str) -> ToolCall:
    call = as_object(given)
    function = as_object(call.get("function", call))
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise MessageError(path, "needs a function with a name, and arguments as a text or an object")
    return ToolCall(_of_type(call, "id", str, path) or "", name, arguments)


def _of_type[T](values: Mapping[str, Any], name: str, kind: type[T], path: str) -> T | None:
    given: object = values.get(name)
    if given is None or isinstance(given, kind):
        return given
    raise MessageError(f"{path}.{name}", f"must be of type {kind.__name__}, got {given!r:.100}")


def as_object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


type Spans = tuple[tuple[int, int], ...]
"""Spans of a text, start included and end excluded, in ascending order."""
MASK = "\ue000"
"""A character that no special token contains."""


@dataclass(frozen=True)
class Rendered:
    """A text for the model; literal: spans of special tokens spelled out in content that stay plain text."""

    text: str
    literal: Spans = ()

    def begins_with(self, beginning: Rendered) -> bool:
        """Return true if this text begins with the other one, including its literal spans."""
        within = takewhile(lambda span: span[1] <= len(beginning.text), self.literal)
        return self.text.startswith(beginning.text) and tuple(within) == beginning.literal

    def part(self, start: int, end: int | None = None) -> Rendered:
        end = len(self.text) if end is None else end
        inside = ((first - start, last - start) for first, last in self.literal if start <= first < end)
        return Rendered(self.text[start:end], tuple(inside))


def contents(messages: Iterable[Message], tools: Tools = ()) -> list[str]:
    """Return all texts in messages and tools, including roles but not frames."""
    said = list[str]()

    def keep(text: str) -> str:
        said.append(text)
        return text

    for message in messages:
        message.with_texts(keep)
    with_strings([*tools], keep)
    return [*filter(None, said)]


def literal_spans(text: str, tokens: Sequence[str], frame: tuple[int, int] = (0, 0)) -> Spans:
    """Return the spans of the special tokens in a text, without searching `frame` (see `Message.frame`)."""
    if not tokens:
        return ()
    found = pattern_of(tuple(tokens)).finditer(text, frame[0], len(text) - frame[1])
    return tuple(one.span() for one in found)


@lru_cache(maxsize=16)
def pattern_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches special tokens as tokenizers do: leftmost, then longest."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


class Seal:
    """Replaces special tokens by marks while a chat template renders, and puts the tokens back afterwards."""

    def __init__(self, tokens: Sequence[str], texts: Sequence[str]) -> None:
        self._tokens, number = tokens, 0
        while any(f"{MASK}{number}." in text for text in texts):
            number += 1
        self._mark = f"{MASK}{number}."
        self._marks = {token: f"{self._mark}{place}." for place, token in enumerate(tokens)}

    def close(self, text: str) -> str:
        return pattern_of(tuple(self._marks)).sub(lambda found: self._marks[found[0]], text)

    def open(self, text: str) -> Rendered:
        parts = re.split(rf"{re.escape(self._mark)}(\d+)\.", text)
        opened, literal = parts[0], list[tuple[int, int]]()
        for number, behind in zip(parts[1::2], parts[2::2], strict=True):
            token = self._tokens[int(number)]
            literal.append((len(opened), len(opened) + len(token)))
            opened += token + behind
        return Rendered(opened, tuple(literal))
