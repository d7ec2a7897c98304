"""The turns of a conversation, and texts in which the places of special tokens that content spells are kept."""

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
    """A function that an answer calls. arguments: a JSON object, or the model's text in its place."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | str:
        """The arguments as chat templates expect them: as an object where they are one."""
        try:
            found: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return cast("dict[str, Any]", found) if isinstance(found, dict) else self.arguments

    def fields(self, *, parsed: bool) -> dict[str, Any]:
        """Return it in OpenAI's form; parsed: with arguments as chat templates expect them."""
        function = {"name": self.name, "arguments": self.parsed if parsed else self.arguments}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Characters at its beginning and at its end that are of a file of the recipe; those between them are content."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Functions that an assistant calls."""
    tool_call_id: str = ""
    """Of the call that a tool answers."""
    name: str = ""
    """Of the speaker, such as the tool that answers."""
    reasoning: str = ""
    """Thoughts of an assistant, where they are apart from its content."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False, repr=False)
    """Further fields, which the chat template gets as they are."""
    null: bool = field(default=False, compare=False, repr=False)
    """The content is null, which some templates show otherwise than an empty one."""
    trained: bool = field(default=True, compare=False, repr=False)
    """False of an assistant's message that is shown, and not imitated."""

    def with_texts(self, change: Callable[[str], str]) -> Message:
        """Change every text but that of the frame, the strings in arguments of calls among them."""
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
        """Return its fields by OpenAI's names, without empty ones; parsed: arguments as objects, for chat templates."""
        shown: dict[str, Any] = {"role": self.role, "content": None if self.null else self.content}
        if self.tool_calls:
            shown["tool_calls"] = [call.fields(parsed=parsed) for call in self.tool_calls]
        more = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return {**self.more, **shown, **{key: value for key, value in more.items() if value}}


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string of a JSON value, names of objects among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {change(name): with_strings(held, change) for name, held in items}
    if isinstance(value, list):
        return [with_strings(held, change) for held in cast("list[Any]", value)]
    return value


type Context = str | Sequence[Message]
"""The question: a text, or a conversation."""


class MessageError(RefusedError):
    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}", code="message-field")
        self.path = path


_READ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "weight")


def read_message(given: object, path: str) -> Message:
    """Read a message as OpenAI writes it; fields that are null are not there. Raises MessageError."""
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
    """Read a message of data, in which an assistant's content may be null beside something else."""
    message = read_message(given, path)
    if message.null and message == Message(message.role, ""):
        raise MessageError(f"{path}.content", "is null or missing, and the message has nothing else")
    if message.null and message.role != "assistant":
        raise MessageError(f"{path}.content", "is null or missing, which it may be of an assistant alone")
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
"""Places of a text, each from its first character to after its last one, in order."""
MASK = "\ue000"
"""A character that no special token has."""


@dataclass(frozen=True)
class Rendered:
    """A text for the model; literal: the special tokens in it that content spells."""

    text: str
    literal: Spans = ()

    def begins_with(self, beginning: Rendered) -> bool:
        """Return whether it begins with another text, and content spells the same special tokens in both."""
        within = takewhile(lambda span: span[1] <= len(beginning.text), self.literal)
        return self.text.startswith(beginning.text) and tuple(within) == beginning.literal

    def part(self, start: int, end: int | None = None) -> Rendered:
        end = len(self.text) if end is None else end
        inside = ((first - start, last - start) for first, last in self.literal if start <= first < end)
        return Rendered(self.text[start:end], tuple(inside))


def contents(messages: Iterable[Message], tools: Tools = ()) -> list[str]:
    """Return all texts of messages but their frames, roles among them, and all texts of tools."""
    said = list[str]()

    def keep(text: str) -> str:
        said.append(text)
        return text

    for message in messages:
        message.with_texts(keep)
    with_strings([*tools], keep)
    return [*filter(None, said)]


def literal_spans(text: str, tokens: Sequence[str], frame: tuple[int, int] = (0, 0)) -> Spans:
    """Find the special tokens that a text spells; frame: as `Message.frame`."""
    if not tokens:
        return ()
    found = pattern_of(tuple(tokens)).finditer(text, frame[0], len(text) - frame[1])
    return tuple(one.span() for one in found)


@lru_cache(maxsize=16)
def pattern_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds special tokens as tokenizers do: from the left, the longest one."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


class Seal:
    """Puts marks in the place of special tokens while a chat template renders, and the tokens back after it."""

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
