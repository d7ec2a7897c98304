"""A file of prompts to answer: a text with a prompt a line, or JSONL with a prompt or messages a line."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import read_row_message
from nemo_rl_mcore.data.strict_json import parse_json, read_regular, torn_text
from nemo_rl_mcore.errors import RefusedError, quoted

_PROMPT, _MESSAGES = "prompt", "messages"


def read_prompts(path: Path, input_key: str | None = None) -> list[Prompt]:
    """Return the prompts of a file, in order, without empty lines; each line of a .jsonl file is an object.

    input_key: of the text or the messages, before the keys `prompt` and `messages`.
    Raises ValueError, naming file and line.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise RefusedError(
            f"{str(path)!r} cannot be read: {error.strerror}", code="unreadable-file"
        ) from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"{str(path)!r} is no text: {error}", code="no-text") from error
    keys = [key for key in (input_key, _PROMPT, _MESSAGES) if key is not None]
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        key, given = (
            _of_object(line, keys, place) if path.suffix == ".jsonl" else ("", line.removesuffix("\r"))
        )
        prompts.append(replace(prompt_of(given, place, key), index=len(prompts)))
    if not prompts:
        raise RefusedError(f"{str(path)!r} holds no prompt", code="no-prompt")
    return prompts


def prompt_of(given: object, place: str, key: str = "") -> Prompt:
    """Return a text, or a conversation as a list of messages, as a prompt; raises RefusedError for all else.

    key: that it stands under, for the message.
    """
    if isinstance(given, str):
        return Prompt(0, given, "", place=place)
    turns = cast("Sequence[object]", given if isinstance(given, list | tuple) else [])
    try:
        messages = tuple(
            read_row_message(turn, f"{key or 'messages'}[{number}]") for number, turn in enumerate(turns)
        )
    except ValueError as error:
        raise RefusedError(f"{place}: {error}", code="prompt-type") from error
    if not messages:
        raise RefusedError(
            f"{place}: {key or 'a prompt'} is {quoted(cast('object', given))}, and must be text or a list of messages",
            code="prompt-type",
        )
    return Prompt(0, "", "", context=messages, place=place)


def _of_object(line: str, keys: list[str], place: str) -> tuple[str, object]:
    """Return the key of a prompt, and what stands under it."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise RefusedError(f"{place}: not JSON: {error}", code="no-json") from error
    if torn := torn_text(row):
        raise RefusedError(
            f"{place}: half a surrogate pair, which is no character, in {torn}", code="no-text"
        )
    values = cast("dict[str, object]", row) if isinstance(row, dict) else {}
    key = next((key for key in keys if key in values), None)
    if key is None:
        raise RefusedError(
            f"{place}: no object with one of the keys {', '.join(dict.fromkeys(keys))}", code="no-prompt-key"
        )
    return key, values[key]
