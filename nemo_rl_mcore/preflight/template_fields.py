"""What the chat template of a run leaves out of its rows: contents of a role, fields of messages, tools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Problem, Tree
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.hf.hub import local_folder
from nemo_rl_mcore.config.policy import TokenizerConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import Example, Examples
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.strict_json import read_json

if TYPE_CHECKING:
    from jinja2.parser import Parser

type Said = dict[str, Any]
"""A message, by the names of its fields."""
type Show = Callable[[list[Said], Sequence[Mapping[str, Any]]], str]

_LOOKED_AT = 8
"""Rows of each form of a message: a template that leaves a field out does so in all of them, or by its place."""
_OTHER_CONTENT = "some-content-4821"


def unshown_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield a warning for each field that the template shows nothing of, with the first row that has it."""
    if not config.data.apply_chat_template or (show := template_of(config.policy.tokenizer)) is None:
        return
    for path, rows in (("data.train", examples.train), ("data.validation", examples.held_out)):
        looked_at, found = Counter[tuple[str, ...]](), dict[tuple[str, str], list[str]]()
        for row in rows:
            messages = [message.fields(parsed=True) for message in _messages(row, config.row_kind)]
            forms: set[tuple[str, ...]] = {(one["role"], *one) for one in messages}
            forms |= {("tools",)} if row.extras.tools else set()
            if any(looked_at[form] < _LOOKED_AT for form in forms):
                looked_at.update(forms)
                for what in _left_out(messages, row.extras.tools, show):
                    found.setdefault(what, []).append(row.place)
        for (name, role), places in found.items():
            of = f" of messages of role {role!r}" if role else ""
            more = f", and so in {len(places) - 1} more rows that were looked at" if len(places) > 1 else ""
            what = f"{places[0]}: the chat template shows nothing of {name}{of}{more}"
            remedy = "leave it out, or name a tokenizer or policy.tokenizer.chat_template that shows it"
            yield Problem("has-no-effect", path, what, remedy, ("policy.tokenizer.name",))


def _messages(row: Example, kind: RowKind) -> Iterator[Message]:
    """Yield what a row says, where it has more to it than plain texts."""
    if isinstance(row.context, str):
        yield Message("user", row.context)
    else:
        yield from row.context
    if kind is not RowKind.PROMPTS:
        yield row.extras.answer or Message("assistant", row.answer if row.solution is None else row.solution)


def _left_out(
    messages: list[Said], tools: Sequence[Mapping[str, Any]], show: Show
) -> Iterator[tuple[str, str]]:
    """Yield each field, and the role that has it, without which a conversation is shown as it is with it."""

    def shown(said: list[Said], tools: Sequence[Mapping[str, Any]]) -> str | None:
        from jinja2 import TemplateError

        try:
            return show(said, tools)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ):
            return None  # it is told as the run reads its rows, before the ranks start

    whole = shown(messages, tools)
    if whole is None:
        return
    if tools and shown(messages, ()) == whole:
        yield "tools", ""
    for role, *names in dict.fromkeys((one["role"], *one) for one in messages):
        for name in names:
            changed = [
                _without(one, name) if (one["role"], *one) == (role, *names) else one for one in messages
            ]
            if name != "role" and changed != messages and shown(changed, tools) == whole:
                yield name, role


def _without(message: Said, name: str) -> Said:
    if name == "content":  # which each message has
        return {**message, name: _OTHER_CONTENT} if message[name] else message
    return {key: value for key, value in message.items() if key != name}


def template_of(tokenizer: TokenizerConfig) -> Show | None:
    """Return what shows a conversation as transformers does, which is not imported; None where no file says it."""
    folder = local_folder(tokenizer.name)
    settings: Tree = {}
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        try:
            settings = cast("Tree", read_json(folder / "tokenizer_config.json", finite=False))
        except (OSError, ValueError):
            return None  # reported as what is wrong with the tokenizer
    given = tokenizer.chat_template or _own_template(folder, settings)
    if given is None:
        return None
    texts = {"default": given} if isinstance(given, str) else given
    tokens = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
    variables: dict[str, Any] = {**tokens, **(tokenizer.chat_template_kwargs or {})}

    def show(messages: list[Said], tools: Sequence[Mapping[str, Any]]) -> str:
        text = texts.get("tool_use" if tools else "default") or next(iter(texts.values()))
        return (
            _environment()
            .from_string(text)
            .render(messages=messages, tools=[*tools] or None, add_generation_prompt=False, **variables)
        )

    return show


def _own_template(folder: Path | None, settings: Tree) -> str | dict[str, str] | None:
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {str(one["name"]): str(one["template"]) for one in cast("list[Tree]", given)}
    return given if isinstance(given, str) else None


def _text(token: object) -> object:
    return cast("Tree", token).get("content") if isinstance(token, dict) else token


def _environment() -> Any:
    """Return what templates of models are written for, see transformers' chat_template_utils.py."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A mark of what an assistant says, which shows nothing itself."""

        tags = {"generation"}  # noqa: RUF012 - as the class above has it

        def parse(self, parser: Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise ValueError(message)

    def as_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    found: Any = environment
    found.filters["tojson"] = as_json
    found.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    return found
