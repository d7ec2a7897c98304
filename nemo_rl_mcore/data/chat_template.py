"""The chat template of a run, looked at without transformers: what it reads, leaves out, and ends its turns with."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Problem, Tree
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.policy import TokenizerConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import Example, Examples
from nemo_rl_mcore.data.hub_cache import local_folder
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.data.tokenizer_folder import ends_of

if TYPE_CHECKING:
    from jinja2.parser import Parser

type Said = dict[str, Any]
"""A message, by the names of its fields."""
type Show = Callable[[list[Said], Sequence[Mapping[str, Any]]], str | None]
"""What a template makes of messages and tools; None where it fails, which is told as the run reads its rows."""

_LOOKED_AT = 8
"""Rows of each form of a message: a template that leaves a field out does so in all of them, or by its place."""
_OTHER_CONTENT = "some-content-4821"


def unshown_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield a warning for each field that the template shows nothing of, with the first row that has it."""
    if not config.data.apply_chat_template or (show := _shown_by(config.policy.tokenizer)) is None:
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
    whole = show(messages, tools)
    if whole is None:
        return
    if tools and show(messages, ()) == whole:
        yield "tools", ""
    for role, *names in dict.fromkeys((one["role"], *one) for one in messages):
        for name in names:
            changed = [
                _without(one, name) if (one["role"], *one) == (role, *names) else one for one in messages
            ]
            if name != "role" and changed != messages and show(changed, tools) == whole:
                yield name, role


def _without(message: Said, name: str) -> Said:
    if name == "content":  # which each message has
        return {**message, name: _OTHER_CONTENT} if message[name] else message
    return {key: value for key, value in message.items() if key != name}


def turn_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a chat template that writes none of the ends behind an answer: a model that has learnt it runs on."""
    ends = [text for text in ends_of(config.policy).values() if text]
    if not config.data.apply_chat_template or config.data.add_eos or not ends:
        return
    show, answer = _shown_by(config.policy.tokenizer), "ANSWER"
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]
    behind = ((show and show(said, ())) or "").rpartition(answer)[2]
    if behind.strip() and not any(end in behind for end in ends):
        yield Problem(
            "contradicts",
            "data.apply_chat_template",
            f"the chat template writes {behind!r:.80} behind an answer, which holds none of the ends of an answer "
            f"({', '.join(map(repr, ends))}), so that answers in its form run on to their length limit",
            "name the id of its end of turn in policy.generation.stop_token_ids, or in eos_token_id of the model's "
            "generation_config.json",
            ("policy.generation.stop_token_ids",),
        )


def unread_variables(config: RunConfig) -> Iterator[Problem]:
    """Yield variables that the chat template does not read, as far as it lies on this machine."""
    tokenizer = config.policy.tokenizer
    given = tokenizer.chat_template_kwargs
    if not given or not config.shows_chats or (read := _variables(tokenizer)) is None:
        return
    for name in given:
        if name not in read:
            near = difflib.get_close_matches(name, read, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            source = "policy.tokenizer.chat_template" if tokenizer.chat_template else "policy.tokenizer.name"
            what = "has no effect: the chat template does not read it"
            yield Problem(
                "has-no-effect", f"policy.tokenizer.chat_template_kwargs.{name}", what, remedy, (source,)
            )


def _variables(tokenizer: TokenizerConfig) -> set[str] | None:
    """Return what the templates read; None where there is none, or one that is no Jinja, as showing a row will tell."""
    from jinja2 import TemplateSyntaxError, meta

    texts = _templates(tokenizer, _settings(tokenizer)).values()
    try:
        trees = [_environment().parse(text) for text in texts]
    except TemplateSyntaxError:
        return None
    return {name for tree in trees for name in meta.find_undeclared_variables(tree)} if trees else None


def _shown_by(tokenizer: TokenizerConfig) -> Show | None:
    """Return what shows a conversation as transformers does; None where no file that is here says it."""
    settings = _settings(tokenizer)
    texts = _templates(tokenizer, settings)
    tokens = {
        key: cast("Tree", value).get("content") if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token")
    }
    variables: dict[str, Any] = {**tokens, **(tokenizer.chat_template_kwargs or {})}

    def show(messages: list[Said], tools: Sequence[Mapping[str, Any]]) -> str | None:
        from jinja2 import TemplateError

        text = texts.get("tool_use" if tools else "default") or next(iter(texts.values()))
        given = variables | {"messages": messages, "tools": [*tools] or None, "add_generation_prompt": False}
        try:
            return _environment().from_string(text).render(given)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ):
            return None

    return show if texts else None


def _settings(tokenizer: TokenizerConfig) -> Tree:
    """Return tokenizer_config.json; what is wrong with it is told where the tokenizer is examined."""
    folder = local_folder(tokenizer.name)
    if folder is None:
        return {}
    try:
        found = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return {}
    return cast("Tree", found) if isinstance(found, dict) else {}


def _templates(tokenizer: TokenizerConfig, settings: Tree) -> dict[str, str]:
    """Return the templates by name, as far as the recipe or files that are here have them."""
    if tokenizer.chat_template:
        return {"default": tokenizer.chat_template}
    folder = local_folder(tokenizer.name)
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        try:
            return {"default": read_regular(file).decode()}
        except (OSError, ValueError):
            return {}
    given = settings.get("chat_template")
    named = (
        cast("list[object]", given) if isinstance(given, list) else [{"name": "default", "template": given}]
    )
    found = [cast("Tree", one) for one in named if isinstance(one, dict)]
    return {str(one.get("name")): text for one in found if isinstance(text := one.get("template"), str)}


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
