"""What an answer says and which tools it calls, read from its text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from nemo_rl_mcore.agents.session import Call
from nemo_rl_mcore.data.messages import ToolCall
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ID_LENGTH = 9
"""Some templates, such as Mistral's, take ids of nine letters and digits alone."""

type Function = tuple[str, str]
"""A name, and the arguments as JSON."""


class ToolParser(Protocol):
    """Reads the text and the ids of an answer, neither with the token that ended it."""

    def __call__(self, text: str, ids: Sequence[int]) -> tuple[str, list[Function]]:
        """Return what the answer says besides its calls, and the calls in their order."""
        ...


def no_tools(text: str, ids: Sequence[int]) -> tuple[str, list[Function]]:
    """Take an answer as text, whatever it says."""
    return text, []


def hermes(text: str, ids: Sequence[int]) -> tuple[str, list[Function]]:
    """Read calls as Hermes and Qwen write them: a JSON object between `<tool_call>` and `</tool_call>`.

    What is no object with a name, and arguments that are an object, stays text; so does a call that is not ended.
    """
    found = [(match, _function(match[1])) for match in _CALL.finditer(text)]
    calls = [(match, function) for match, function in found if function is not None]
    if not calls:
        return text, []
    ends = [0, *(match.end() for match, _ in calls)]
    starts = [*(match.start() for match, _ in calls), len(text)]
    said = [text[end:start].strip() for end, start in zip(ends, starts, strict=True)]
    return "\n".join(filter(None, said)), [function for _, function in calls]


def _function(text: str) -> Function | None:
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    call = cast("dict[str, Any]", given)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


class _OfRenderers:
    """A parser of the library `renderers`, which reads ids."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        library = import_module("renderers.parsers")
        known: list[str] = [*library.TOOL_PARSERS]
        if name not in known:
            allowed = ", ".join((*_OWN, *known))
            raise RefusedError(f"tool_parser {name!r} is none of {allowed}", code="unknown-tool-parser")
        self._tokenizer = tokenizer
        self._parser = library.get_tool_parser(name, _AsRenderersAsk(tokenizer))

    def __call__(self, text: str, ids: Sequence[int]) -> tuple[str, list[Function]]:
        said, found = self._parser.extract([*ids])
        calls = [call for call in found if call.name and isinstance(call.arguments, dict)]
        if len(calls) < len(found) or not calls:
            return text, []
        functions = [(str(call.name), json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
        return self._tokenizer.text_of(said).strip(), functions


class _AsRenderersAsk:
    """The few methods of a tokenizer of transformers that the library's parsers call."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def convert_tokens_to_ids(self, token: str) -> int | None:
        ids = self._tokenizer.encode(token)
        return ids[0] if len(ids) == 1 else None

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return self._tokenizer.text_of(ids)


_OWN: dict[str, ToolParser] = {"hermes": hermes, "none": no_tools}


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Return a parser by its name: `hermes`, `none`, or one of the library `renderers`.

    Raises ImportError where that is asked for and not installed (the extra `tool-parsers`), RefusedError for a name
    that it does not know.
    """
    return _OWN.get(name) or _OfRenderers(name, tokenizer)


def calls_of(call: Call, functions: Sequence[Function]) -> tuple[ToolCall, ...]:
    """Return the functions that an answer calls, with ids that are the same whenever the same tokens are drawn."""
    drawn = f"{_hash_of(call.prompt_P.tobytes())}.{_hash_of(call.answer_N.tobytes())}.{call.repetition}"
    return tuple(
        ToolCall(_hash_of(f"{drawn}.{place}".encode())[:_ID_LENGTH], *function)
        for place, function in enumerate(functions)
    )


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
