"""The reference of all keys, made from the models and from the table of unsupported keys: a page for each section.

Run as a module, it writes the pages into the folder that it is given.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from nemo_rl_mcore.config.base import Key, Rule, StrictModel, as_yaml, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.recipe.rules.policies import POLICY_RULES
from nemo_rl_mcore.recipe.rules.runs import RUN_RULES
from nemo_rl_mcore.recipe.schema import allowed, section_of
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, RENAMED, Judgement

_INTRODUCTION = """\
# Reference of the keys

Every key of a recipe, with what it allows, its default and its meaning.
[Configuration](../configuration.md) says how recipes are put together.
The pages are generated; a test keeps them equal to the models:

```bash
uv run python -m nemo_rl_mcore.tools.reference docs/reference
```
"""

_UNSUPPORTED_INTRODUCTION = """\
## Keys that do nothing here

A migration leaves such a key out at a neutral value, where it changes nothing. What another value does stands in the
last columns: it is refused with an advice, or, where it costs speed or memory alone, left out and reported. The table
stands in `nemo_rl_mcore/tools/migrate/judgements.yaml`.
"""


_RENAMED_INTRODUCTION = """\
# Keys of NeMo RL

What [`migrate` and `--migrate`](../migrating.md) make of them; a recipe that is run without has none.

## Keys that have another name here

They become the key next to them, and `async_rl`, which NeMo RL has for GRPO alone, makes the run asynchronous.
"""

_COMBINATIONS_INTRODUCTION = """\
# What does not go together

`check`, and each run before it starts, refuses these combinations by the names of their keys, with the values that the
recipe gives them. `ALGORITHM` is the section of the recipe's algorithm, `ASYNC` that of its asynchronous rollouts; what
stands at one section holds of each that has the same keys, such as a teacher's model. What depends on sizes, such as a
layout that does not divide, is told where it happens.
"""

_PAGES_OF_THEIR_OWN = ("policy.model", "policy.megatron_cfg", "policy.generation")
"""Sections inside others that are long enough for a page."""

_FOREIGN_PAGE, _COMBINATIONS_PAGE = "nemo_rl", "combinations"
_PLACES = {"loop": "ALGORITHM", "asynchrony": "ALGORITHM.ASYNC", "gradient": "loss_fn"}
"""What stands on a page for the paths of rules that depend on the algorithm."""

_LIKE = 4
"""So many rows in common make a section a repeat of an earlier one, to which it links."""

type _Row = tuple[str, ...]
type _Section = tuple[str, str, list[_Row]]
"""A section's path, its purpose, and the rows of its own keys."""


def reference_pages() -> dict[str, str]:
    """Return the pages as Markdown, by the names of their files; each ends with a line feed."""
    top, *shared = _sections(RunConfig, "")
    pages: dict[str, list[_Section]] = {}
    for section in shared:
        pages.setdefault(_page_of(section[0]), []).append(section)
    pages |= {name: list(_sections_of_its_own(kind)) for name, kind in RUN_CONFIGS.items()}
    titles = {name: ", ".join(f"`{path}`" for path, *_ in sections) for name, sections in pages.items()}
    shown: list[tuple[str, list[_Row]]] = []
    texts = {name: _page(name, sections, shown) for name, sections in pages.items()}
    contents = (
        *((f"[{name}]({name}.md)", title) for name, title in titles.items()),
        (
            f"[{_FOREIGN_PAGE}]({_FOREIGN_PAGE}.md)",
            "keys of NeMo RL that have another name here, or do nothing",
        ),
        (f"[{_COMBINATIONS_PAGE}]({_COMBINATIONS_PAGE}.md)", "what does not go together"),
    )
    index = "\n".join((_INTRODUCTION, _table(("page", "sections"), iter(contents)), _text("index", top, [])))
    texts |= {"index": index, _FOREIGN_PAGE: _page_of_nemo_rl(), _COMBINATIONS_PAGE: _combinations()}
    return {f"{name}.md": text for name, text in texts.items()}


def _page_of(path: str) -> str:
    """Return the page of a section that all recipes have: that of a section around it, or of its first name."""
    own = (page for page in _PAGES_OF_THEIR_OWN if path == page or path.startswith(f"{page}."))
    return next(own, path.partition(".")[0])


def _page(name: str, sections: list[_Section], shown: list[tuple[str, list[_Row]]]) -> str:
    purpose = f"Recipes of `{name}` have these besides the sections of all.\n" if name in RUN_CONFIGS else ""
    texts = (_text(name, section, shown) for section in sections)
    return "\n".join((f"# Keys of `{name}`\n", *([purpose] if purpose else []), *texts))


def _text(page: str, section: _Section, shown: list[tuple[str, list[_Row]]]) -> str:
    """Return a section with its table, or with the rows by which it differs from one that is shown already.

    shown: a link to each section of before, and its rows; this one is added.
    """
    path, purpose, rows = section
    columns = ("key", "allowed", "default", "meaning")
    parts = [f"## `{path}`" if path else "## Top level", purpose]
    likest, alike = max(
        ((one, len({*one[1]} & {*rows})) for one in shown), key=lambda pair: pair[1], default=(None, 0)
    )
    if likest is None or alike < max(_LIKE, len(rows) / 2):
        parts.append(_table(columns, iter(rows)))
    else:
        link, before = likest
        names = {row[0] for row in rows}
        without = ", ".join(row[0] for row in before if row[0] not in names)
        differing = [row for row in rows if row not in before]
        as_there = f"The keys of {link}" + (f" without {without}" if without else "")
        parts.append(as_there + (", and:\n\n" + _table(columns, iter(differing)) if differing else ".\n"))
    anchor = path.replace(".", "").lower()
    shown.append((f"[`{path}`]({page}.md#{anchor})", rows))
    return "\n\n".join(parts)


def _sections_of_its_own(kind: type[RunConfig]) -> Iterator[_Section]:
    """Yield what recipes of an algorithm have besides the sections that all have."""
    for name in (name for name in kind.model_fields if name not in RunConfig.model_fields):
        section = section_of(kind.model_fields[name])
        assert section is not None
        yield from _sections(section, name)


def _sections(model: type[StrictModel], path: str) -> Iterator[_Section]:
    """Yield a section's own keys, then the sections inside it; one that may be null is a key as well.

    The keys of sources stand once, below data.train.
    """
    inner = {name: section for name, field in model.model_fields.items() if (section := section_of(field))}
    own = {name: field for name, field in model.model_fields.items() if inner.get(name) != field.annotation}
    yield path, inspect.getdoc(model) or "", [_row(name, field) for name, field in own.items()]
    for name, section in inner.items():
        inside = join_path(path, name)
        if section is not SourceConfig or inside == "data.train":
            yield from _sections(section, inside)


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    default = "required" if field.is_required() else f"`{_yaml(field.default)}`"
    return f"`{name}`", allowed(field), default, " ".join((field.description or "").split())


def _page_of_nemo_rl() -> str:
    renamed = ((f"`{theirs}`", f"`{own}`") for theirs, own in RENAMED.items())
    judged = (_judged_row(path, known) for path, known in JUDGEMENTS.items())
    columns = ("key", "neutral", "otherwise", "what is said")
    tables = (_table(("key", "becomes"), renamed), _UNSUPPORTED_INTRODUCTION, _table(columns, judged))
    return "\n".join((_RENAMED_INTRODUCTION, *tables))


def _judged_row(path: str, known: Judgement) -> tuple[str, ...]:
    neutral = [f"`{_yaml(value)}`" for value in known.neutral]
    if known.unread:
        neutral.append("any value; it is not read")
    if known.switched_off:
        neutral.append("off (`enabled: false`)")
    if known.unless:
        neutral.append(f"any value where `{known.unless}` is off")
    if known.same_as:
        neutral.append(f"the value of `{known.same_as}`")
    otherwise = "" if known.unread else "reported" if known.told else "refused"
    return f"`{path}`", " or ".join(neutral), otherwise, known.told or known.refused


def _yaml(value: object) -> str:
    """Write a value as a recipe does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _combinations() -> str:
    sections = (row for kind in RUN_CONFIGS.values() for row in _rules_of_sections(kind, ""))
    policy = ((row, lambda path: join_path("policy", path)) for row in POLICY_RULES if isinstance(row, Rule))
    runs = ((row, _place) for row in RUN_RULES if isinstance(row, Rule))
    rows: dict[int, tuple[str, ...]] = {}
    for row, key in (*policy, *runs, *sections):
        if row.code in ("incompatible", "not-supported"):
            rows.setdefault(id(row), _combination(row, key))
    table = _table(("key", "does not go with", "because", "instead"), iter(sorted(rows.values())))
    return _COMBINATIONS_INTRODUCTION + "\n" + table


def _place(path: str) -> str:
    first, dot, rest = path.partition(".")
    return f"{_PLACES.get(first, first)}{dot}{rest}"


def _rules_of_sections(section: type[StrictModel], path: str) -> Iterator[tuple[Rule[Any], Key]]:
    for row in section.rules:
        if isinstance(row, Rule):
            yield row, lambda inner: join_path(path, inner)
    for name, field in section.model_fields.items():
        inside, inner = join_path(path, name), section_of(field)
        if inner and (inner is not SourceConfig or inside == "data.train"):
            yield from _rules_of_sections(inner, inside)


def _combination(rule: Rule[Any], key: Key) -> tuple[str, ...]:
    """Return a row of the table; what a rule computes of a recipe's values is left out."""
    fix = rule.fix
    if isinstance(fix, Mapping):
        fix = ", or ".join(f"`{key(path)}: {as_yaml(value)}`" for path, value in fix.items())
    because = rule.why or rule.says
    return (
        f"`{key(rule.path)}`",
        ", ".join(f"`{key(path)}`" for path in rule.related if path != rule.path),
        because if isinstance(because, str) else "",
        fix if isinstance(fix, str) else "",
    )


def _table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [_line(row) for row in rows] or [_line(("none", *("",) * (len(headings) - 1)))]
    return "\n".join((_line(headings), _line(("---",) * len(headings)), *lines)) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in reference_pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
