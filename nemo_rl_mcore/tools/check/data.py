"""A run's data set and chat template, examined without torch or transformers: rows, steps, problems."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Problem, Tree
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.policy import TokenizerConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import (
    Examples,
    Prompt,
    count_problems,
    last_step,
    read_examples,
    read_texts,
    special_token_problems,
)
from nemo_rl_mcore.data.hub import ends_of, local_folder, special_tokens_of
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.rows import GYM_COLUMN, is_fetched
from nemo_rl_mcore.data.strict_json import read_json, read_regular

if TYPE_CHECKING:
    from jinja2.parser import Parser

FIRST_ROWS = 2
"""Rows that `check` shows."""
_LOOKED_AT = 8
"""Rows of each form of a message: a template that leaves a field out does so in all of them, or by its place."""

type Show = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]]], str | None]
"""Renders messages and tools; None where the template fails, an error that the run raises as it reads its rows."""


@dataclass(frozen=True)
class DataPlan:
    """The length of a data set's files; rows that are dropped for their length are still counted.

    first: the rows to train on that `check` shows.
    """

    rows: int
    held_out: int
    rows_per_step: int
    steps: int
    first: tuple[Prompt, ...] = ()
    warnings: tuple[Problem, ...] = ()


def examine_data(config: RunConfig) -> tuple[DataPlan | None, list[Problem]]:
    """Read the data set's files; None where its rows cannot be counted, since they are fetched later.

    Among the problems are warnings.
    """
    problems, chat = [*template_problems(config)], config.data.apply_chat_template
    if not config.data.from_files:
        texts = config.data.default
        return None, problems + [one.below("data.default") for one in (read_texts(texts)[1] if texts else ())]
    if fetched(config):
        for path, source in (config.train_sources | config.validation_sources).items():
            if is_fetched(source):
                problems += [problem.below(path) for problem in read_texts(source)[1]]
            else:
                problems += read_examples({path: source}, {}, config.row_kind, chat=chat)[1]
        return None, problems
    examples, wrong = read_examples(
        config.train_sources, config.validation_sources, config.row_kind, chat=chat
    )
    problems += wrong
    rows, held_out = examples.train, examples.held_out
    if not wrong:
        problems += count_problems(config, rows, held_out)
        lacking = (row for row in (*rows, *held_out) if GYM_COLUMN not in row.columns)
        if config.env.nemo_gym is not None and (row := next(lacking, None)) is not None:
            what = f"{row.place} has no {GYM_COLUMN}, and NeMo Gym's agents play the rows"
            remedy = "name rows of NeMo Gym's"
            problems.append(Problem("missing", "data.train", what, remedy, ("env.nemo_gym",)))
        tokens = special_tokens_of(config.policy.tokenizer.name)
        parts = {"data.train": rows, "data.validation": held_out}
        problems += special_token_problems(config, parts, tokens, config.row_kind)
        problems += _unshown_problems(config, examples)
    warnings: tuple[Problem, ...] = ()
    pairs = [*rows, *held_out] if config.row_kind is RowKind.PAIRS else []
    if equal := [pair for pair in pairs if pair.rejected == (pair.solution or pair.answer)]:
        what = f"{len(equal)} of {len(pairs)} pairs have two equal answers, which teach nothing; "
        what += f"the first is {equal[0].place}"
        warnings = (Problem("no-signal", "data.train", what, "leave them out"),)
    steps, first = last_step(config, len(rows))[0], tuple(rows[:FIRST_ROWS])
    return DataPlan(len(rows), len(held_out), config.prompts_per_step, steps, first, warnings), problems


def fetched(config: RunConfig) -> list[str]:
    """Return the data sets of the hub that the run fetches when it starts."""
    sources = (*config.train_sources.values(), *config.validation_sources.values())
    return list(dict.fromkeys(source.paths[0] for source in sources if is_fetched(source)))


# The chat template


def has_template(folder: Path) -> bool:
    """Look for a chat template in a tokenizer's folder; True where its files cannot be read."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return True  # a problem of the tokenizer's, or a format that its library reads
    return isinstance(settings, dict) and bool(cast("Tree", settings).get("chat_template"))


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a tokenizer without a chat template where one is to be applied."""
    if not config.data.apply_chat_template or config.policy.tokenizer.chat_template is not None:
        return
    name = config.policy.tokenizer.name
    folder = local_folder(name)
    if name == "char" or (folder is not None and not has_template(folder)):
        what = f"true needs a chat template, and policy.tokenizer.name: {name} has none"
        where = "chat_template in its tokenizer_config.json"
        remedy = f"name a tokenizer that has one ({where}), or set it to false"
        yield Problem("requires", "data.apply_chat_template", what, remedy)


def turn_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a warning for a chat template that ends no answer: a model that has learnt it runs on."""
    ends = [text for text in ends_of(config.policy).values() if text]
    if not config.data.apply_chat_template or config.data.add_eos or not ends:
        return
    show, answer = _shown_by(config.policy.tokenizer), "ANSWER"
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]
    behind = ((show and show(messages, ())) or "").rpartition(answer)[2]
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
    if not given or not (config.data.apply_chat_template or config.env.endpoint is not None):
        return
    from jinja2 import TemplateSyntaxError, meta

    texts, _ = _templates(tokenizer)
    try:
        trees = [_environment().parse(text) for text in texts.values()]
    except TemplateSyntaxError:
        return  # an error that the run raises
    read = {name for tree in trees for name in meta.find_undeclared_variables(tree)}
    source = "policy.tokenizer.chat_template" if tokenizer.chat_template else "policy.tokenizer.name"
    for name in [one for one in given if trees and one not in read]:
        near = difflib.get_close_matches(name, read, n=1)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        key, what = f"policy.tokenizer.chat_template_kwargs.{name}", "the chat template does not read it"
        yield Problem("has-no-effect", key, f"has no effect: {what}", remedy, (source,))


def _unshown_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield a warning for each field that the template leaves out, with the first row that has it."""
    if not config.data.apply_chat_template or (show := _shown_by(config.policy.tokenizer)) is None:
        return
    for path, rows in (("data.train", examples.train), ("data.validation", examples.held_out)):
        looked_at, found = Counter[tuple[str, ...]](), dict[tuple[str, str], list[str]]()
        for row in rows:
            shown = [*(row.context or (Message("user", row.text),))]
            if config.row_kind is not RowKind.PROMPTS:
                given = row.answer if row.solution is None else row.solution
                shown.append(row.answer_message or Message("assistant", given))
            messages = [message.fields(parsed=True) for message in shown]
            forms: set[tuple[str, ...]] = {(one["role"], *one) for one in messages}
            forms |= {("tools",)} if row.tools else set()
            if any(looked_at[form] < _LOOKED_AT for form in forms):
                looked_at.update(forms)
                for field in _left_out(messages, row.tools, show):
                    found.setdefault(field, []).append(row.place)
        for (name, role), places in found.items():
            of = f" of messages of role {role!r}" if role else ""
            more = f", and so in {len(places) - 1} more rows that were looked at" if len(places) > 1 else ""
            what = f"{places[0]}: the chat template shows nothing of {name}{of}{more}"
            remedy = "leave it out, or name a tokenizer or policy.tokenizer.chat_template that shows it"
            yield Problem("has-no-effect", path, what, remedy, ("policy.tokenizer.name",))


def _left_out(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], show: Show
) -> Iterator[tuple[str, str]]:
    """Yield each field, and its role, without which a conversation is rendered the same."""
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


def _shown_by(tokenizer: TokenizerConfig) -> Show | None:
    """Return a renderer of conversations as transformers has it; None without a template on this machine."""
    texts, tokens = _templates(tokenizer)
    variables = tokens | (tokenizer.chat_template_kwargs or {})

    def show(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
        from jinja2 import TemplateError

        text = texts.get("tool_use" if tools else "default") or next(iter(texts.values()))
        given = variables | {"messages": messages, "tools": [*tools] or None, "add_generation_prompt": False}
        # Errors of a template's own code.
        own = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
        try:
            return _environment().from_string(text).render(given)
        except (TemplateError, *own):
            return None

    return show if texts else None


def _templates(tokenizer: TokenizerConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Return templates and special tokens by name, from the recipe or files of this machine.

    Problems with the files are reported where the tokenizer is examined.
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
    every = cast("list[Any]", given) if isinstance(given, list) else [{"name": "default", "template": given}]
    named = [cast("Tree", one) for one in every if isinstance(one, dict)]
    texts = {str(one.get("name")): text for one in named if isinstance(text := one.get("template"), str)}
    return texts, tokens


def _environment() -> Any:
    """Return the environment that chat templates are written for: transformers' chat_template_utils.py."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks an assistant's text, and renders nothing itself."""

        tags = {"generation"}  # noqa: RUF012 - as the class above has it

        def parse(self, parser: Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise ValueError(message)

    def as_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    found: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    found.filters["tojson"] = as_json
    found.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    return found
