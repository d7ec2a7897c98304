"""Variables that a recipe gives a chat template, and those that the template reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.hf.hub import local_folder
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.strict_json import read_json, read_regular

_KEY = "policy.tokenizer.chat_template_kwargs"


def unread_variables(config: RunConfig) -> Iterator[Problem]:
    """Yield variables that the chat template does not read, as far as it lies on this machine."""
    tokenizer = config.policy.tokenizer
    given = tokenizer.chat_template_kwargs
    folder = local_folder(tokenizer.name)
    if not given or not config.shows_chats:
        return
    texts = [tokenizer.chat_template] if tokenizer.chat_template else _own_templates(folder) if folder else []
    read = _variables(texts)
    if read is None:
        return
    for name in given:
        if name not in read:
            near = difflib.get_close_matches(name, read, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            source = "policy.tokenizer.chat_template" if tokenizer.chat_template else "policy.tokenizer.name"
            what = "has no effect: the chat template does not read it"
            yield Problem("has-no-effect", f"{_KEY}.{name}", what, remedy, (source,))


def _own_templates(folder: Path) -> list[str]:
    """Return the templates in a folder of a tokenizer; what cannot be read is told where the tokenizer is examined."""
    try:
        if (own := folder / "chat_template.jinja").is_file():
            return [read_regular(own).decode()]
        settings = read_json(folder / "tokenizer_config.json", finite=False)
    except (OSError, ValueError):
        return []
    found = cast("dict[str, object]", settings).get("chat_template") if isinstance(settings, dict) else None
    named = cast("list[object]", found) if isinstance(found, list) else [{"template": found}]
    texts = [cast("dict[str, object]", one).get("template") for one in named if isinstance(one, dict)]
    return [text for text in texts if isinstance(text, str)]


def _variables(texts: list[str]) -> set[str] | None:
    """Return what templates read; None where there is none, or one that is no Jinja, as showing a row will tell."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes  # for templates with variables alone
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block that marks what an assistant says, which transformers has templates know."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    try:
        trees = [environment.parse(text) for text in texts]
    except TemplateSyntaxError:
        return None
    return {name for tree in trees for name in meta.find_undeclared_variables(tree)} if trees else None
