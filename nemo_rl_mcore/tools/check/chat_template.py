"""The chat template of a run, looked at without transformers: what it reads, leaves out, and ends its turns with."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Problem, Tree
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.policy import TokenizerConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import Examples
from nemo_rl_mcore.data.hub import local_folder
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


def _messages(row: Prompt, kind: RowKind) -> Iterator[Message]:
    """Yield what a row says, where it has more to it than plain texts."""
    yield from row.context or (Message("user", row.text),)
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
            changed = [dict(one) for one in messages]
            for one in changed:
                if (one["role"], *one) != (role, *names):
                    continue
                if name != "content":
                    del one[name]
                elif one[name]:  # which each message has
                    one[name] = "some-content-4821"
            if name != "role" and changed != messages and show(changed, tools) == whole:
                yield name, role


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

    texts, _ = _templates(tokenizer)
    try:
        trees = [_environment().parse(text) for text in texts.values()]
    except TemplateSyntaxError:
        return None
    return {name for tree in trees for name in meta.find_undeclared_variables(tree)} if trees else None


def _shown_by(tokenizer: TokenizerConfig) -> Show | None:
    """Return what shows a conversation as transformers does; None where no file that is here says it."""
    texts, tokens = _templates(tokenizer)
    variables = tokens | (tokenizer.chat_template_kwargs or {})

    def show(messages: list[Said], tools: Sequence[Mapping[str, Any]]) -> str | None:
        from jinja2 import TemplateError

        text = texts.get("tool_use" if tools else "default") or next(iter(texts.values()))
        given = variables | {"messages": messages, "tools": [*tools] or None, "add_generation_prompt": False}
        # What a template's own code raises.
        own = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
        try:
            return _environment().from_string(text).render(given)
        except (TemplateError, *own):
            return None

    return show if texts else None


def _templates(tokenizer: TokenizerConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the templates, and the special tokens, by name, as far as the recipe or files that are here have them.

    What is wrong with the files is told where the tokenizer is examined.
    """
    folder, settings = local_folder(tokenizer.name), cast("Tree", {})
    with suppress(OSError, ValueError):
        found = None if folder is None else read_json(folder / "tokenizer_config.json", finite=False)
        settings = cast("Tree", found) if isinstance(found, dict) else settings
    tokens = {
        key: cast("Tree", value).get("content") if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token")
    }
    if tokenizer.chat_template:
        return {"default": tokenizer.chat_template}, tokens
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        try:
            return {"default": read_regular(file).decode()}, tokens
        except (OSError, ValueError):
            return {}, tokens
    given = settings.get("chat_template")
    several = (
        cast("list[object]", given) if isinstance(given, list) else [{"name": "default", "template": given}]
    )
    named = [cast("Tree", one) for one in several if isinstance(one, dict)]
    texts = {str(one.get("name")): text for one in named if isinstance(text := one.get("template"), str)}
    return texts, tokens


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
