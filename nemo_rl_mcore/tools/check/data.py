"""A run's data set, tokenizer files and chat template, examined without torch or transformers."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
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
from nemo_rl_mcore.data.hub import (
    CHAR_EOS,
    CHAR_TOKENIZER_NAME,
    CHAR_VOCABULARY,
    KEY,
    end_ids,
    has_tokenizer,
    is_hub_id,
    local_folder,
    tokenizer_folder,
    too_large,
)
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.rows import GYM_COLUMN, is_fetched
from nemo_rl_mcore.data.strict_json import read_json, read_regular

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from tokenizers import Tokenizer

    from nemo_rl_mcore.config.policy import PolicyConfig

FIRST_ROWS = 2
"""Rows that `check` shows."""
_LOOKED_AT = 8
"""Rows examined per form of message: if a template ignores a field, these few show it."""

type Show = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]]], str | None]
"""Renders messages and tools; returns None if the template fails, which the run reports when it reads its rows."""


@dataclass(frozen=True)
class DataPlan:
    """Row and step counts, including rows that will be dropped as too long. first: rows that `check` shows."""

    rows: int
    held_out: int
    rows_per_step: int
    steps: int
    first: tuple[Prompt, ...] = ()
    warnings: tuple[Problem, ...] = ()


def examine_data(config: RunConfig) -> tuple[DataPlan | None, list[Problem]]:
    """Read the data files; return None if the rows cannot be counted yet because the run fetches them.

    The problems include warnings.
    """
    problems, chat = [*template_problems(config)], config.data.apply_chat_template
    if config.data.dataset_name != "files":
        texts = config.data.default
        return None, problems + [one.below("data.default") for one in (read_texts(texts)[1] if texts else ())]
    if fetched(config):
        for path, source in (config.train_sources | config.validation_sources).items():
            if is_fetched(*source.paths):
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
            what = f"{row.place} has no {GYM_COLUMN}, which NeMo Gym's agents need"
            remedy = "use rows made for NeMo Gym"
            problems.append(Problem("missing", "data.train", what, remedy, ("env.nemo_gym",)))
        tokens = special_tokens_of(config.policy.tokenizer.name)
        parts = {"data.train": rows, "data.validation": held_out}
        problems += special_token_problems(config, parts, tokens, config.row_kind)
        problems += _unshown_problems(config, examples)
    warnings: tuple[Problem, ...] = ()
    pairs = [*rows, *held_out] if config.row_kind is RowKind.PAIRS else []
    if equal := [pair for pair in pairs if pair.rejected == (pair.solution or pair.answer)]:
        what = f"{len(equal)} of {len(pairs)} pairs have equal answers and teach nothing; "
        what += f"the first is {equal[0].place}"
        warnings = (Problem("no-signal", "data.train", what, "leave them out"),)
    steps, first = last_step(config, len(rows))[0], tuple(rows[:FIRST_ROWS])
    return DataPlan(len(rows), len(held_out), config.prompts_per_step, steps, first, warnings), problems


def fetched(config: RunConfig) -> list[str]:
    """Return the hub data sets that the run fetches when it starts."""
    sources = (*config.train_sources.values(), *config.validation_sources.values())
    return list(dict.fromkeys(source.paths[0] for source in sources if is_fetched(*source.paths)))


# The chat template


def has_template(folder: Path) -> bool:
    """Return True if a tokenizer's folder has a chat template, or if its files cannot be read."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return True  # a problem that is reported elsewhere, or a format that only its library reads
    return isinstance(settings, dict) and bool(cast("Tree", settings).get("chat_template"))


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if the recipe applies a chat template and the tokenizer has none."""
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
    """Yield a warning if the chat template does not end answers: a model that learns it never stops."""
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
            f"the chat template ends an answer with {behind!r:.80}, which contains no end of an answer "
            f"({', '.join(map(repr, ends))}), so answers in its format run to the length limit",
            "add the template's end-of-turn id to policy.generation.stop_token_ids, or to eos_token_id in the model's "
            "generation_config.json",
            ("policy.generation.stop_token_ids",),
        )


def unread_variables(config: RunConfig) -> Iterator[Problem]:
    """Yield the recipe's template variables that the chat template does not read, if it is on this machine."""
    tokenizer = config.policy.tokenizer
    given = tokenizer.chat_template_kwargs
    if not given or not (config.data.apply_chat_template or config.env.endpoint is not None):
        return
    from jinja2 import TemplateSyntaxError, meta

    texts, _ = _templates(tokenizer)
    try:
        trees = [_environment().parse(text) for text in texts.values()]
    except TemplateSyntaxError:
        return  # the run reports it
    read = {name for tree in trees for name in meta.find_undeclared_variables(tree)}
    source = "policy.tokenizer.chat_template" if tokenizer.chat_template else "policy.tokenizer.name"
    for name in [one for one in given if trees and one not in read]:
        near = difflib.get_close_matches(name, read, n=1)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        key, what = f"policy.tokenizer.chat_template_kwargs.{name}", "the chat template does not read it"
        yield Problem("has-no-effect", key, f"has no effect: {what}", remedy, (source,))


def _unshown_problems(config: RunConfig, examples: Examples) -> Iterator[Problem]:
    """Yield a warning for each field that the template ignores, with the first row that has the field."""
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
            of = f" in messages of role {role!r}" if role else ""
            more = f", as in {len(places) - 1} other examined rows" if len(places) > 1 else ""
            what = f"{places[0]}: the chat template ignores {name}{of}{more}"
            remedy = "leave it out, or use a tokenizer or policy.tokenizer.chat_template that shows it"
            yield Problem("has-no-effect", path, what, remedy, ("policy.tokenizer.name",))


def _left_out(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], show: Show
) -> Iterator[tuple[str, str]]:
    """Yield each field, with its role, that can be left out without changing the rendered conversation."""
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
                elif one[name]:  # every message has content: change it
                    one[name] = "some-content-4821"
            if name != "role" and changed != messages and show(changed, tools) == whole:
                yield name, role


def _shown_by(tokenizer: TokenizerConfig) -> Show | None:
    """Return a renderer like transformers' own; None without a template on this machine."""
    texts, tokens = _templates(tokenizer)
    variables = tokens | (tokenizer.chat_template_kwargs or {})

    def show(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
        from jinja2 import TemplateError

        text = texts.get("tool_use" if tools else "default") or next(iter(texts.values()))
        given = variables | {"messages": messages, "tools": [*tools] or None, "add_generation_prompt": False}
        # Errors of the template's own code.
        own = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
        try:
            return _environment().from_string(text).render(given)
        except (TemplateError, *own):
            return None

    return show if texts else None


def _templates(tokenizer: TokenizerConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Return templates and special tokens by name, from the recipe or local files; unreadable files count as empty."""
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
    """Return a Jinja environment like the one in transformers' chat_template_utils.py."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A tag around an assistant's text that renders nothing itself."""

        tags = {"generation"}  # noqa: RUF012 - as in the base class

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


_REMEDY = "name a local Hugging Face tokenizer folder, or set it to char"


def tokenizer_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield problems of `policy.tokenizer.name`: unreadable, or too large for policy.model.vocab_size."""
    name = policy.tokenizer.name
    folder = tokenizer_folder(name)
    if folder is None:
        if name != CHAR_TOKENIZER_NAME and not is_hub_id(name):  # a hub id is fetched at the start
            yield Problem("not-found", KEY, f"no folder {name!r} in {Path.cwd()}", _REMEDY)
        return
    if not has_tokenizer(name):
        what = f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer_config.json)"
        yield Problem("not-found", KEY, what, "name a folder that does, or set it to char")
        return
    settings, tokenizer, problems = _read_tokenizer(folder)
    yield from problems
    if tokenizer is None:
        return
    # Loading adds the settings' tokens that tokenizer.json lacks. Only transformers can list those that the tokenizer's
    # class may add on top.
    named = [settings.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for many in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        listed = settings.get(many)
        listed = [*cast("Tree", listed).values()] if isinstance(listed, dict) else listed
        named += cast("list[object]", listed) if isinstance(listed, list) else []
    texts = {text for token in named if (text := _text_of(token)) is not None}
    lacking = [text for text in texts if tokenizer.token_to_id(text) is None]
    tokens = rows = tokenizer.get_vocab_size()
    # Ids with gaps need more rows than tokens. This check is twice as fast as building the vocabulary, a dict.
    if any(tokenizer.id_to_token(token) is None for token in range(tokens)):
        rows = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if (rows := max(rows, tokens + len(lacking))) > policy.model.vocab_size:
        yield too_large(policy, rows)


def special_tokens_of(name: str) -> list[str]:
    """Return the special tokens in tokenizer.json; those of other formats are not read."""
    folder = tokenizer_folder(name)
    tokenizer = None if folder is None else _read_tokenizer(folder)[1]
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def ends_of(policy: PolicyConfig) -> dict[int, str]:
    """Return the ids that end answers and their texts, from files on this machine.

    The tokenizer's own id is first, then those of the model's files, then the recipe's.
    """
    name = policy.tokenizer.name
    more = (*end_ids(policy.model_name, name), *(policy.generation.stop_token_ids or ()))
    if name == CHAR_TOKENIZER_NAME:
        texts = dict(enumerate(CHAR_VOCABULARY))
        return {token: texts.get(token, "") for token in (CHAR_VOCABULARY.index(CHAR_EOS), *more)}
    folder = local_folder(name)
    settings, tokenizer, _ = ({}, None, []) if folder is None else _read_tokenizer(folder)
    if tokenizer is None:
        return dict.fromkeys(more, "")
    own = _text_of(settings.get("eos_token"))
    first = None if own is None else tokenizer.token_to_id(own)
    ids = more if first is None else (first, *more)
    return {token: tokenizer.id_to_token(token) or "" for token in ids}


def _read_tokenizer(folder: Path) -> tuple[Tree, Tokenizer | None, list[Problem]]:
    settings, tokenizer, problems = Tree(), None, list[Problem]()
    for path in (folder / "tokenizer_config.json", folder / "tokenizer.json"):
        try:
            if not path.exists():  # as in older formats
                continue
            if path.name == "tokenizer.json":
                tokenizer = _parsed(read_regular(path))
                continue
            if not isinstance(found := read_json(path, finite=False), dict):
                raise ValueError("it should be an object")
            settings = cast("Tree", found)
        except (OSError, ValueError) as error:
            wrong = f"is not what a tokenizer is saved as: {error}"
            wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else wrong
            problems.append(Problem("not-readable", KEY, f"{str(path)!r} {wrong}", _REMEDY))
    return settings, tokenizer, problems


def _text_of(token: object) -> str | None:
    text = cast("Tree", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


@lru_cache(maxsize=1)
def _parsed(content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # Some files make the library panic with a BaseException whose class cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")) from error
