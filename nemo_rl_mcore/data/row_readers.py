"""From the columns of a row to a prompt and its answers.

Some rows are first put in the columns of a pair: NeMo RL's completions with ranks, HelpSteer3's preferences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.messages import Context, Message
from nemo_rl_mcore.data.row import Row
from nemo_rl_mcore.errors import RefusedError, code_of
from nemo_rl_mcore.strict_json import shortened


@dataclass(frozen=True)
class RankedAnswers:
    """A prompt with a better and a worse answer; `tied` says that neither is better, and both may be the first."""

    context: object
    chosen: object
    rejected: object
    tied: bool = False


def ranked_answers(row: Mapping[str, object]) -> RankedAnswers | None:
    """Return the answers of a row whose columns say which is better; None for any other row."""
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        first, second, preference = (row[key] for key in ("response1", "response2", "overall_preference"))
        if not isinstance(preference, int | float):
            raise ValueError(f"overall_preference is {preference!r:.40}, and must be a number")
        tied = preference == 0
        better, worse = (second, first) if preference > 0 else (first, first if tied else second)
        return RankedAnswers(row["context"], better, worse, tied)
    if {"context", "completions"} <= row.keys():
        return _by_rank(row)
    return None


def _by_rank(row: Mapping[str, object]) -> RankedAnswers:
    given = row["completions"]
    answers = [_as_answer(one) for one in cast("list[object]", given)] if isinstance(given, list) else []
    if len(answers) != 2 or None in answers:
        raise RefusedError(
            "completions are not two of a rank, which is a number, and a completion", code="completions"
        )
    first, second = sorted(filter(None, answers), key=lambda one: cast("int", one["rank"]))
    tied = first["rank"] == second["rank"]
    return RankedAnswers(row["context"], first["completion"], second["completion"], tied)


def _as_answer(given: object) -> Mapping[str, object] | None:
    """Return a completion with its rank; None for anything else."""
    one = cast("Mapping[str, object]", given if isinstance(given, Mapping) else {})
    return one if "completion" in one and isinstance(one.get("rank"), int | float) else None


_ASSISTANT = "assistant"
GYM_COLUMN = "responses_create_params"
"""The column of a row of NeMo Gym's that has the first call of its agent."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": _ASSISTANT}


class RowError(RefusedError):
    """What is wrong with a row."""


class ColumnError(RowError):
    """A column that is not there, and the key of the source that names it."""

    def __init__(self, setting: str, what: str) -> None:
        super().__init__(what)
        self.setting = setting


@dataclass(frozen=True)
class Read:
    """What was read of a row, before its prompt gets its texts; `unscored` says why it cannot be scored against."""

    context: Context
    answer: str
    rejected: str | None = None
    imitate_all: bool = False
    solution: str | None = None
    unscored: str = ""
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)


class RowReader:
    """Reads the rows of a source for an algorithm; `chat` allows conversations."""

    def __init__(self, source: SourceConfig, kind: RowKind, *, chat: bool) -> None:
        self._source = source
        self._kind = kind
        self._chat = chat

    def read(self, row: Row) -> Read | None:
        """Return a row's prompt and answers; None for a pair without a better answer. Raises RowError."""
        if row.wrong:
            raise RowError(row.wrong)
        try:
            ranked = ranked_answers(row.values)
        except ValueError as error:
            raise RowError(str(error), code=code_of(error)) from error
        if ranked is not None and self._source.prompt_key not in row.values:
            return self._ranked(ranked)
        if GYM_COLUMN in row.values and self._source.input_key not in row.values:
            return self._of_gym(row.values)
        if self._kind is RowKind.PAIRS:
            return self._pair(row.values)
        read = self._answered(row.values)
        read = read if self._source.answer is None else self._with_answer(read, row.values)
        return replace(
            read, columns={name: _value(row.values, "columns", name) for name in self._source.columns}
        )

    def _answered(self, values: Mapping[str, object]) -> Read:
        source = self._source
        # A library that knows columns has a null where a row of this one has none.
        if self._kind is RowKind.ANSWERS and (
            values.get(source.chat_key) is not None
            or (source.chat_key in values and values.get(source.input_key) is None)
        ):
            turns = self._messages(values[source.chat_key], source.chat_key)
            if len(turns) < 2 or turns[-1].role != _ASSISTANT:
                raise RowError(f"{source.chat_key} does not end with an assistant's answer to a message")
            return Read(turns[:-1], turns[-1].content, imitate_all=True)
        context = self._context(_value(values, "input_key", source.input_key), source.input_key)
        if source.output_key is None:
            return Read(context, "")
        return Read(context, _answer(_value(values, "output_key", source.output_key), source.output_key))

    def _with_answer(self, read: Read, values: Mapping[str, object]) -> Read:
        """Return the row with what is scored against beside what is imitated."""
        how = self._source.answer
        assert how is not None
        text = read.answer if how.key is None else _answer(_value(values, "answer.key", how.key), how.key)
        found = how.extract(text) if how.in_text else text.strip() or None
        if found is None:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
            lacking = how.lacking if how.in_text else "is empty"
            return Read(
                read.context, read.answer, None, read.imitate_all, unscored=f"the answer {shown!r} {lacking}"
            )
        solution = read.answer if self._kind is RowKind.ANSWERS else None
        return Read(read.context, found, None, read.imitate_all, solution)

    def _of_gym(self, values: Mapping[str, object]) -> Read:
        """Return what an agent of NeMo Gym's begins with, as far as the row has it, and all columns for the agent."""
        if not self._chat:
            raise RowError(f"{GYM_COLUMN} is a conversation, which needs data.apply_chat_template: true")
        asked = _as_section(values[GYM_COLUMN]).get("input")
        given = [{"role": "user", "content": asked}] if isinstance(asked, str) else _as_list(asked)
        messages = [message for one in given if (message := _of_response(one)) is not None]
        return Read(tuple(messages) or (Message("user", ""),), "", columns=values)

    def _pair(self, values: Mapping[str, object]) -> Read:
        source = self._source
        chosen = _value(values, "chosen_key", source.chosen_key)
        rejected = _value(values, "rejected_key", source.rejected_key)
        if len(_as_list(chosen)) > 1 and _as_list(rejected):
            return self._two_conversations(chosen, rejected)
        context = self._context(_value(values, "prompt_key", source.prompt_key), source.prompt_key)
        return Read(context, _answer(chosen, source.chosen_key), _answer(rejected, source.rejected_key))

    def _two_conversations(self, chosen: object, rejected: object) -> Read:
        better = self._messages(chosen, self._source.chosen_key)
        worse = self._messages(rejected, self._source.rejected_key)
        if better[:-1] != worse[:-1]:
            raise RowError("the two conversations differ before their last message")
        if {better[-1].role, worse[-1].role} != {_ASSISTANT}:
            raise RowError("a conversation does not end with an assistant's answer")
        return Read(better[:-1], better[-1].content, worse[-1].content)

    def _ranked(self, ranked: RankedAnswers) -> Read | None:
        if ranked.tied and self._kind is RowKind.PAIRS and self._source.ties == "drop":
            return None
        context, chosen = (
            self._context(ranked.context, "context"),
            _answer(ranked.chosen, "the better answer"),
        )
        if self._kind is not RowKind.PAIRS:
            return Read(context, chosen)
        return Read(context, chosen, _answer(ranked.rejected, "the worse answer"))

    def _context(self, given: object, key: str) -> Context:
        if _as_list(given) or given == []:
            return self._messages(given, key)
        if not isinstance(given, str) or not given:
            raise RowError(f"{key} is {_shown(given)}, and must be text")
        return given

    def _messages(self, given: object, key: str) -> tuple[Message, ...]:
        if not self._chat:
            raise RowError(f"{key} is a conversation, which needs data.apply_chat_template: true")
        messages = _as_list(given)
        if not messages:
            raise RowError(f"{key} is {_shown(given)}, and must be a list of messages")
        turns = tuple(_message(message, key) for message in messages)
        if turns[0].role == _ASSISTANT:
            raise RowError(f"{key} begins with an assistant's message, which answers nothing")
        return turns


def _answer(given: object, key: str) -> str:
    """Return the text of an answer; a message of the assistant alone is its text."""
    if len(messages := _as_list(given)) == 1 and (message := _message(messages[0], key)).role == _ASSISTANT:
        return message.content
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise RowError(f"{key} is {_shown(given)}, and must be text or a number")
    return str(given)


def _value(values: Mapping[str, object], setting: str, key: str) -> object:
    """Return the value of a column; dots lead into columns that hold others."""
    if key in values:
        return values[key]
    inner: object = values
    for part in key.split("."):
        there = _as_section(inner)
        if part not in there:
            has = shortened(", ".join(map(repr, there or values)), 200) or "none"
            raise ColumnError(setting, f"no key {key!r}; it has {has}")
        inner = there[part]
    return inner


def _as_list(value: object) -> Sequence[object]:
    """Return a list as it is, and an empty one for all else, which holds no elements here."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def _as_section(value: object) -> Mapping[str, object]:
    """Return a mapping as it is; nothing else holds keys here."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _message(given: object, key: str) -> Message:
    values = _as_section(given)
    role, content = values.get("role"), values.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowError(f"{key} holds {_shown(given)}, which is no message with a role and a content of text")
    return Message(role, content)


def _of_response(given: object) -> Message | None:
    """Return an item of OpenAI's Responses API as a message, of its texts; None for a call of a tool and the like."""
    values = _as_section(given)
    role, content = values.get("role"), values.get("content")
    if role not in _ROLES:
        return None
    parts = (
        [content] if isinstance(content, str) else [_as_section(one).get("text") for one in _as_list(content)]
    )
    return Message(_ROLES[str(role)], "".join(part for part in parts if isinstance(part, str)))


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
