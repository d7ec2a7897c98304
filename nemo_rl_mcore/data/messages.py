"""The turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast


@dataclass(frozen=True)
class ToolCall:
    """A function that an answer calls. arguments: a JSON object, or what the model wrote in its place."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | str:
        """Return the arguments as chat templates expect them: as an object where they are one."""
        try:
            found: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return cast("dict[str, Any]", found) if isinstance(found, dict) else self.arguments


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str
    frame: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Characters at its beginning and at its end that a file of the recipe says; what is between them is content."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Functions that an assistant calls."""
    tool_call_id: str = ""
    """Which call a tool answers."""
    name: str = ""
    """Who speaks, such as the tool that answers."""
    reasoning: str = ""
    """Thoughts of an assistant, where they are apart from its content."""

    def with_texts(self, change: Callable[[str], str]) -> Message:
        """Change every text but that of the frame, the strings in arguments of calls among them."""
        start, end = self.frame[0], len(self.content) - self.frame[1]
        return replace(
            self,
            role=change(self.role),
            content=f"{self.content[:start]}{change(self.content[start:end])}{self.content[end:]}",
            tool_calls=tuple(_call_with_texts(call, change) for call in self.tool_calls),
            tool_call_id=change(self.tool_call_id),
            name=change(self.name),
            reasoning=change(self.reasoning),
        )


def _call_with_texts(call: ToolCall, change: Callable[[str], str]) -> ToolCall:
    parsed = call.parsed
    if isinstance(parsed, str):
        arguments = change(parsed)
    else:
        arguments = json.dumps(with_strings(parsed, change), ensure_ascii=False)
    return ToolCall(change(call.id), change(call.name), arguments)


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


Context = str | tuple[Message, ...]
"""What the model is shown before it answers: a text, or a conversation."""
