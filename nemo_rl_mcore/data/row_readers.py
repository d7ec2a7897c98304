"""From the columns of a row to a prompt and its answers.

Some rows are first put in the columns of a pair: NeMo RL's completions with ranks, HelpSteer3's preferences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import (
    Context,
    Extras,
    Message,
    MessageError,
    Tools,
    as_object,
    read_row_message,
)
from nemo_rl_mcore.data.rows import Row
from nemo_rl_mcore.data.strict_json import parse_json
from nemo_rl_mcore.errors import RefusedError, code_of, shortened

_ASSISTANT = "assistant"
GYM_COLUMN = "responses_create_params"
"""The column of a row of NeMo Gym's that has the first call of its agent."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": _ASSISTANT}
_NEEDS_TEMPLATE = "which needs data.apply_chat_template: true"


class RowError(RefusedError):
    """What is wrong with a row."""


class ColumnError(RowError):
    """A column that is not there, and the key of the source that names it."""

    def __init__(self, setting: str, what: str) -> None:
        super().__init__(what)
        self.setting = setting


class RowReader:
    """Reads the rows of a source for an algorithm; `chat` allows conversations."""

    def __init__(self, source: SourceConfig, kind: RowKind, *, chat: bool) -> None:
        self._source = source
        self._kind = kind
        self._chat = chat

    def read(self, row: Row) -> Prompt | None:
        """Return a row before it gets its texts and its index; None for a pair without a better answer.

        Raises RowError.
        """
        if row.wrong:
            raise RowError(row.wrong)
        source, values = self._source, row.values
        if not row.of_lines:  # a library fills in nulls for fields that a message or tool has not
            keys = {source.chat_key, source.input_key, source.prompt_key, source.chosen_key}
            keys |= {source.rejected_key, source.tool_key or ""}
            keys |= {"context", "completions", "response1", "response2"}
            values = {key: _filled(value) if key in keys else value for key, value in values.items()}
        ranked = _ranked_answers(values)
        if GYM_COLUMN in values and source.input_key not in values and ranked is None:
            return replace(self._of_gym(values), place=row.place)
        if ranked is not None and source.prompt_key not in values:
            read = self._ranked(*ranked)
        elif self._kind is RowKind.PAIRS:
            read = self._pair(values)
        else:
            read = self._answered(values)
            columns = {name: _value(row.values, "columns", name) for name in source.columns}
            read = replace(read, columns=columns)
        tools = self._tools(values)
        return read and replace(read, place=row.place, extras=replace(read.extras, tools=tools))

    def _tools(self, values: Mapping[str, object]) -> Tools:
        """Return the functions that answers of a row may call: a list, or its JSON as text."""
        key = self._source.tool_key
        given = None if key is None or not self._chat else values.get(key)
        if isinstance(given, str) and given:
            with suppress(ValueError):
                given = parse_json(given)
        if not given:
            return ()
        if not _as_list(given) or not all(isinstance(one, dict) for one in _as_list(given)):
            raise RowError(
                f"{key} is {_shown(values[str(key)])}, and must be a list of functions; "
                "set tool_key to another column, or to null"
            )
        return cast("Tools", given)

    def _answered(self, values: Mapping[str, object]) -> Prompt:
        source = self._source
        # A library that knows columns has a null where a row of this one has none.
        if self._kind is RowKind.ANSWERS and (
            values.get(source.chat_key) is not None
            or (source.chat_key in values and values.get(source.input_key) is None)
        ):
            turns = self._messages(values[source.chat_key], source.chat_key)
            if len(turns) < 2 or turns[-1].role != _ASSISTANT:
                raise RowError(f"{source.chat_key} does not end with an assistant's answer to a message")
            extras = Extras(answer=_beyond_text(turns[-1]), own_turn=True)
            read = _prompt(turns[:-1], turns[-1].content, imitate_all=True, extras=extras)
        else:
            context = self._context(_value(values, "input_key", source.input_key), source.input_key)
            answer = Message(_ASSISTANT, "")
            if source.output_key is not None:
                answer = self._answer(_value(values, "output_key", source.output_key), source.output_key)
            read = _prompt(context, answer.content, extras=Extras(answer=_beyond_text(answer)))
        how = source.answer
        if how is None:
            return read
        # What is scored against stands beside what is imitated.
        text = read.answer
        if how.key is not None:
            text = self._answer(_value(values, "answer.key", how.key), how.key).content
        found = how.extract(text) if how.in_text else text.strip() or None
        if found is None:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
            lacking = how.lacking if how.in_text else "is empty"
            return replace(read, unscored=f"the answer {shown!r} {lacking}")
        return replace(read, answer=found, solution=read.answer if self._kind is RowKind.ANSWERS else None)

    def _of_gym(self, values: Mapping[str, object]) -> Prompt:
        """Return what an agent of NeMo Gym's begins with, as far as the row has it, and all columns for the agent.

        Of the items of OpenAI's Responses API that are the texts of messages; calls of tools and the like are left out.
        """
        if not self._chat:
            raise RowError(f"{GYM_COLUMN} is a conversation, {_NEEDS_TEMPLATE}")
        asked = as_object(values[GYM_COLUMN]).get("input")
        messages = list[Message]()
        for item in [{"role": "user", "content": asked}] if isinstance(asked, str) else _as_list(asked):
            role, content = as_object(item).get("role"), as_object(item).get("content")
            parts = (
                [content]
                if isinstance(content, str)
                else [as_object(one).get("text") for one in _as_list(content)]
            )
            if role in _ROLES:
                text = "".join(part for part in parts if isinstance(part, str))
                messages.append(Message(_ROLES[str(role)], text))
        return _prompt(tuple(messages) or (Message("user", ""),), "", columns=values)

    def _pair(self, values: Mapping[str, object]) -> Prompt:
        source = self._source
        chosen = _value(values, "chosen_key", source.chosen_key)
        rejected = _value(values, "rejected_key", source.rejected_key)
        if len(_as_list(chosen)) <= 1 or not _as_list(rejected):
            context = self._context(_value(values, "prompt_key", source.prompt_key), source.prompt_key)
            better = self._answer(chosen, source.chosen_key)
            return _pair_of(context, better, self._answer(rejected, source.rejected_key), own_turn=False)
        better = self._messages(chosen, source.chosen_key)
        worse = self._messages(rejected, source.rejected_key)
        if better[:-1] != worse[:-1]:
            raise RowError("the two conversations differ before their last message")
        if {better[-1].role, worse[-1].role} != {_ASSISTANT}:
            raise RowError("a conversation does not end with an assistant's answer")
        return _pair_of(better[:-1], better[-1], worse[-1], own_turn=True)

    def _ranked(self, asked: object, better: object, worse: object, tied: bool) -> Prompt | None:
        if tied and self._kind is RowKind.PAIRS and self._source.ties == "drop":
            return None
        context, chosen = self._context(asked, "context"), self._answer(better, "the better answer")
        if self._kind is not RowKind.PAIRS:
            return _prompt(context, chosen.content, extras=Extras(answer=_beyond_text(chosen)))
        return _pair_of(context, chosen, self._answer(worse, "the worse answer"), own_turn=False)

    def _context(self, given: object, key: str) -> Context:
        if isinstance(given, list):
            return self._messages(cast("object", given), key)
        if not isinstance(given, str) or not given:
            raise RowError(f"{key} is {_shown(given)}, and must be text")
        return given

    def _messages(self, given: object, key: str) -> tuple[Message, ...]:
        if not self._chat:
            raise RowError(f"{key} is a conversation, {_NEEDS_TEMPLATE}")
        if not _as_list(given):
            raise RowError(f"{key} is {_shown(given)}, and must be a list of messages")
        turns = tuple(_message(message, key, place) for place, message in enumerate(_as_list(given)))
        if turns[0].role == _ASSISTANT:
            raise RowError(f"{key} begins with an assistant's message, which answers nothing")
        return turns

    def _answer(self, given: object, key: str) -> Message:
        """Return an answer: text, a number, or a message of the assistant alone."""
        if len(messages := _as_list(given)) == 1:
            message = _message(messages[0], key, 0)
            if message.role == _ASSISTANT:
                if not self._chat and _beyond_text(message):
                    raise RowError(f"{key} is {_shown(given)}, {_NEEDS_TEMPLATE}")
                return message
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise RowError(f"{key} is {_shown(given)}, and must be text or a number")
        return Message(_ASSISTANT, str(given))


def _ranked_answers(row: Mapping[str, object]) -> tuple[object, object, object, bool] | None:
    """Return the prompt, the better answer, the worse one, and whether neither is; None for rows without ranks."""
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        first, second, preference = (row[key] for key in ("response1", "response2", "overall_preference"))
        if not isinstance(preference, int | float):
            raise RowError(f"overall_preference is {preference!r:.40}, and must be a number")
        tied = preference == 0
        better, worse = (second, first) if preference > 0 else (first, first if tied else second)
        return row["context"], better, worse, tied
    if not {"context", "completions"} <= row.keys():
        return None
    given = [as_object(one) for one in _as_list(row["completions"])]
    if len(given) != 2 or not all(
        "completion" in one and isinstance(one.get("rank"), int | float) for one in given
    ):
        raise RowError(
            "completions are not two of a rank, which is a number, and a completion", code="completions"
        )
    first, second = sorted(given, key=lambda one: one["rank"])
    return row["context"], first["completion"], second["completion"], first["rank"] == second["rank"]


def _prompt(context: Context, answer: str, **more: Any) -> Prompt:
    text, messages = (context, ()) if isinstance(context, str) else ("", context)
    return Prompt(0, text, answer, context=messages, **more)


def _pair_of(context: Context, better: Message, worse: Message, *, own_turn: bool) -> Prompt:
    if not (better.trained and worse.trained):
        raise RowError("an answer of the pair has weight 0, and there is nothing else to train on")
    extras = Extras((), _beyond_text(better), _beyond_text(worse), own_turn)
    return _prompt(context, better.content, rejected=worse.content, extras=extras)


def _beyond_text(message: Message) -> Message | None:
    """Return an answer that is more than its text."""
    plain = message == Message(message.role, message.content) and message.trained
    return None if plain else message


def _filled(value: object) -> object:
    """Return a JSON value without the keys of objects that are null."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: _filled(held) for key, held in items if held is not None}
    return [_filled(held) for held in cast("list[object]", value)] if isinstance(value, list) else value


def _value(values: Mapping[str, object], setting: str, key: str) -> object:
    """Return the value of a column; dots lead into columns that hold others."""
    if key in values:
        return values[key]
    inner: object = values
    for part in key.split("."):
        there = as_object(inner)
        if part not in there:
            has = shortened(", ".join(map(repr, there or values)), 200) or "none"
            raise ColumnError(setting, f"no key {key!r}; it has {has}")
        inner = there[part]
    return inner


def _as_list(value: object) -> Sequence[object]:
    """Return a list as it is, and an empty one for all else, which holds no elements here."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def _message(given: object, key: str, place: int) -> Message:
    try:
        return read_row_message(given, f"{key}[{place}]")
    except MessageError as error:
        what = f"{key} holds {_shown(given)}, which is no message: {error}"
        raise RowError(what, code=code_of(error)) from error


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
