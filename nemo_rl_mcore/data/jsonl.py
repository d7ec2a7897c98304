"""JSONL files of examples: an object a line, read and checked without torch, each mistake named by its line."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.strict_json import parse_json, read_regular, shortened

_SHOWN_LINES = 5
"""Bad lines of a file that are told one by one."""


Context = str | tuple[Message, ...]


@dataclass(frozen=True)
class Example:
    """A row: what the model is shown, and the answer to it; `place` is its file and line.

    imitate_all: every assistant turn of the context is to be imitated, not the answer alone.
    """

    place: str
    index: int
    context: Context
    answer: str
    rejected: str | None = None
    imitate_all: bool = False


@dataclass(frozen=True)
class Examples:
    """The rows to train on, and those held out."""

    train: list[Example]
    held_out: list[Example]


class _RowError(ValueError):
    """What is wrong with a line."""


def read_examples(data: DataConfig, kind: RowKind) -> tuple[Examples, list[Problem]]:
    """Read the files of `data`; what is wrong with them comes as problems, with paths relative to its section."""
    assert data.train is not None
    train, problems = _read(data.train, "train.data_path", kind, chat=data.apply_chat_template)
    if data.validation is not None:
        held_out, more = _read(data.validation, "validation.data_path", kind, chat=data.apply_chat_template)
        return Examples(train, held_out), problems + more
    share = data.train.split_validation_size
    held = [hash_fraction(example.context) < share for example in train]
    return (
        Examples(
            [example for example, out in zip(train, held, strict=True) if not out],
            [example for example, out in zip(train, held, strict=True) if out],
        ),
        problems,
    )


def read_sets(evaluation: EvalConfig, *, chat: bool) -> tuple[dict[str, list[Example]], list[Problem]]:
    """Read the sets of an evaluation; what is wrong with them comes as problems, with whole paths."""
    found: dict[str, list[Example]] = {}
    problems: list[Problem] = []
    for name, source in evaluation.sets.items():
        rows, wrong = _read(source, f"eval.sets.{name}.data_path", RowKind.PROMPTS, chat=chat)
        found[name] = rows[: evaluation.max_samples]
        problems += wrong
    return found, problems


def hash_fraction(context: Context) -> float:
    """A number in [0, 1) that depends on a prompt's text alone: equal prompts stand on the same side of a split."""
    text = context if isinstance(context, str) else repr(context)
    digest = hashlib.sha256(f"held-out:{text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _read(file: SourceConfig, key: str, kind: RowKind, *, chat: bool) -> tuple[list[Example], list[Problem]]:
    path = file.paths[0]
    try:
        content = read_regular(Path(path))
    except OSError as error:
        what = f"{path!r} cannot be read from {Path.cwd()}: {error.strerror}"
        return [], [Problem(key, what, "name a JSONL file")]
    found: list[Example] = []
    wrong: list[str] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_example(line, f"{path}:{number}", len(found), file, kind, chat=chat))
        except _RowError as error:
            wrong.append(f"{path}:{number}: {error}")
    if not found and not wrong:
        return [], [Problem(key, f"{path!r} holds no row", "name a JSONL file with an object a line")]
    return found, [*_line_problems(key, wrong)]


def _line_problems(key: str, wrong: Sequence[str]) -> Iterator[Problem]:
    for text in wrong[:_SHOWN_LINES]:
        yield Problem(key, text)
    if (rest := len(wrong) - _SHOWN_LINES) > 0:
        yield Problem(key, f"{rest} more lines are wrong")


def _example(
    line: bytes, place: str, index: int, file: SourceConfig, kind: RowKind, *, chat: bool
) -> Example:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise _RowError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _RowError(f"not an object but {type(row).__name__}")
    values = cast("dict[str, object]", row)
    if kind is RowKind.PAIRS:
        context = _context(values, file.prompt_key, chat=chat)
        chosen, rejected = (_answer(values, name) for name in (file.chosen_key, file.rejected_key))
        return Example(place, index, context, chosen, rejected)
    if kind is RowKind.ANSWERS and file.chat_key in values:
        turns = _messages(values[file.chat_key], file.chat_key, chat=chat)
        if len(turns) < 2 or turns[-1].role != "assistant":
            raise _RowError(f"{file.chat_key} does not end with an assistant's answer to a message")
        return Example(place, index, turns[:-1], turns[-1].content, imitate_all=True)
    context = _context(values, file.input_key, chat=chat)
    return Example(place, index, context, _answer(values, file.output_key))


def _context(values: Mapping[str, object], key: str, *, chat: bool) -> Context:
    given = _value(values, key)
    if isinstance(given, list):
        return _messages(cast("object", given), key, chat=chat)
    if not isinstance(given, str) or not given:
        raise _RowError(f"{key} is {_shown(given)}, and must be text")
    return given


def _answer(values: Mapping[str, object], key: str) -> str:
    given = _value(values, key)
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise _RowError(f"{key} is {_shown(given)}, and must be text or a number")
    return str(given)


def _value(values: Mapping[str, object], key: str) -> object:
    if key not in values:
        raise _RowError(f"no key {key!r}; it has {shortened(', '.join(map(repr, values)), 200) or 'none'}")
    return values[key]


def _messages(given: object, key: str, *, chat: bool) -> tuple[Message, ...]:
    if not chat:
        raise _RowError(f"{key} is a conversation, which needs data.apply_chat_template: true")
    messages = cast("list[object]", given) if isinstance(given, list) else []
    if not messages:
        raise _RowError(f"{key} is {_shown(cast('object', given))}, and must be a list of messages")
    turns = tuple(_message(message, key) for message in messages)
    if turns[0].role == "assistant":
        raise _RowError(f"{key} begins with an assistant's message, which answers nothing")
    return turns


def _message(given: object, key: str) -> Message:
    values = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    role, content = values.get("role"), values.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise _RowError(
            f"{key} holds {_shown(cast('object', given))}, which is no message with a role and a content of text"
        )
    return Message(role, content)


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))
