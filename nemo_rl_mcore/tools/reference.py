"""The reference of all keys, made from the models and from the table of unsupported keys.

Run as a module, it writes the pages into the folder that it is given.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from nemo_rl_mcore.config.base import Key, Rule, StrictModel, as_yaml, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.recipe.rules.generation import ENGINE_RULES
from nemo_rl_mcore.recipe.rules.policies import POLICY_RULES
from nemo_rl_mcore.recipe.rules.runs import RUN_RULES
from nemo_rl_mcore.recipe.schema import allowed, section_of
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, RENAMED, Judgement

_INTRODUCTION = """\
# Reference of the keys

Every key of a recipe: its allowed values, default and meaning. [Recipes and configuration](../configuration.md)
explains how recipes are put together. The pages are generated from the models, and a test compares them:

```bash
uv run python -m nemo_rl_mcore.tools.reference docs/reference
```
"""

_ALGORITHMS_INTRODUCTION = """\
# Keys of the algorithms

A recipe has the sections of one algorithm, besides those of all recipes. Sections with equal keys stand together.
"""

_RENAMED_INTRODUCTION = """\
# Keys of NeMo RL

[`migrate` and `--migrate`](../migrating.md) convert these keys; a recipe that is run without them has none.
`ALGORITHM` is the section of GRPO, PPO or distillation.

## Renamed keys

NeMo RL has `async_rl` for GRPO only; it makes the run asynchronous.
"""

_UNSUPPORTED_INTRODUCTION = """\
## Keys without a counterpart

At a neutral value the key is left out, because it changes nothing. Another value is refused, or, if it only costs
speed or memory, left out and reported. Source: `nemo_rl_mcore/tools/migrate/judgements.yaml`.
"""

_UNREAD_INTRODUCTION = "## Ignored keys\n\nA migration leaves these out, whatever their value:\n"

_COMBINATIONS_INTRODUCTION = """\
# Refused combinations

`check`, and each run before it starts, refuses these combinations and prints keys, values and remedies. `ALGORITHM`
is the section of the recipe's algorithm, `ASYNC` the section of its asynchronous rollouts. A rule for one section
applies to every section with the same keys, such as a teacher's model. Sizes that do not fit are not listed.
"""

_PAGES_OF_THEIR_OWN = ("policy.model", "policy.megatron_cfg", "policy.generation", "policy", "data", "env")
"""Sections that are long enough for a page, the inner ones first; the others of all recipes are in the index."""

_ALGORITHMS_PAGE, _FOREIGN_PAGE, _COMBINATIONS_PAGE = "algorithms", "nemo_rl", "combinations"
_PLACES = {"loop": "ALGORITHM", "asynchrony": "ALGORITHM.ASYNC", "gradient": "loss_fn"}
"""Names on a page for the paths of rules that depend on the algorithm."""

_LIKE = 4
"""Rows in common that make a section a repeat of an earlier one, to which it links."""

_SHORT = {
    "an integer, ": "integer ",
    "a number, ": "number ",
    "an integer": "integer",
    "a number": "number",
    "at least ": "≥ ",
    "at most ": "≤ ",
    "above ": "> ",
    "below ": "< ",
    "true or false": "bool",
    " or null": ", null",
}

type _Row = tuple[str, ...]
type _Section = tuple[str, str, list[_Row]]
"""A section's path, its purpose, and the rows of its own keys."""


def reference_pages() -> dict[str, str]:
    """Return the pages as Markdown, by the names of their files; each ends with a line feed."""
    pages: dict[str, list[_Section]] = {}
    for section in _sections(RunConfig, ""):
        path = section[0]
        own = (page for page in _PAGES_OF_THEIR_OWN if path == page or path.startswith(f"{page}."))
        pages.setdefault(next(own, "index"), []).append(section)
    pages[_ALGORITHMS_PAGE] = _sections_of_algorithms()
    titles = {
        name: ", ".join(f"`{path}`" for path, *_ in sections if path == name or (path and "." not in path))
        for name, sections in pages.items()
    }
    shown: list[tuple[str, list[_Row]]] = []
    texts = {
        name: "\n".join(_text(name, section, shown) for section in sections)
        for name, sections in pages.items()
    }
    contents = (
        *((f"[{name}]({name}.md)", title) for name, title in titles.items() if name != "index"),
        (f"[{_FOREIGN_PAGE}]({_FOREIGN_PAGE}.md)", "keys of NeMo RL that are renamed, refused or ignored"),
        (f"[{_COMBINATIONS_PAGE}]({_COMBINATIONS_PAGE}.md)", "refused combinations"),
        ("this page", titles["index"]),
    )
    heads = {
        "index": f"{_INTRODUCTION}\n{_table(('page', 'sections'), iter(contents))}",
        _ALGORITHMS_PAGE: _ALGORITHMS_INTRODUCTION,
    }
    texts = {name: f"{heads.get(name) or f'# Keys of `{name}`\n'}\n{text}" for name, text in texts.items()}
    texts |= {_FOREIGN_PAGE: _page_of_nemo_rl(), _COMBINATIONS_PAGE: _combinations()}
    return {f"{name}.md": text for name, text in texts.items()}


def _sections_of_algorithms() -> list[_Section]:
    """Return what recipes of each algorithm have besides the sections of all; those with equal keys are one."""
    paths: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
    for algorithm, kind in RUN_CONFIGS.items():
        for name in (name for name in kind.model_fields if name not in RunConfig.model_fields):
            section = section_of(kind.model_fields[name])
            assert section is not None
            for path, purpose, rows in _sections(section, name):
                label = f"{path}` of `{algorithm}" if path.startswith("loss_fn") else path
                paths.setdefault((purpose, tuple(rows)), []).append(label)
    return [("`, `".join(labels), purpose, list(rows)) for (purpose, rows), labels in paths.items()]


def _text(page: str, section: _Section, shown: list[tuple[str, list[_Row]]]) -> str:
    """Return a section with its table, or with the rows by which it differs from one that is shown already.

    shown: a link to each section of before, and its rows; this one is added.
    """
    path, purpose, rows = section
    columns = ("key", "default; allowed", "meaning")
    heading = f"`{path}`" if path else "Top level"
    parts = [f"## {heading}", purpose]
    likest, alike = max(
        ((one, len({*one[1]} & {*rows})) for one in shown), key=lambda pair: pair[1], default=(None, 0)
    )
    if likest is None or alike < _LIKE:
        parts.append(_table(columns, iter(rows)))
    else:
        link, before = likest
        names = {row[0] for row in rows}
        common = ", ".join(row[0] for row in rows if row in before)
        without = ", ".join(row[0] for row in before if row[0] not in names)
        differing = [row for row in rows if row not in before]
        all_but = f"The keys of {link}" + (f" without {without}" if without else "")
        as_there = all_but if len(all_but) < len(common) else f"{common} as in {link}"
        parts.append(as_there + (", and:\n\n" + _table(columns, iter(differing)) if differing else ".\n"))
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    shown.append((f"[{heading}]({page}.md#{anchor})", rows))
    return "\n\n".join(parts)


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


def _row(name: str, field: FieldInfo) -> _Row:
    values = allowed(field)
    for long, short in _SHORT.items():
        values = values.replace(long, short)
    if field.is_required():
        value = f"required: {values}"
    elif field.default is None:
        value = f"`null` or {values.removesuffix(', null')}"
    else:
        value = f"`{_yaml(field.default)}`" + ("" if values == "bool" else f"; {values}")
    return f"`{name}`", value, " ".join((field.description or "").split())


def _page_of_nemo_rl() -> str:
    renamed = ((f"`{theirs}`", f"`{own}`") for theirs, own in RENAMED.items())
    judged: dict[str, _Row] = {}
    for path, known in JUDGEMENTS.items():
        if not known.unread:
            first, _, rest = path.partition(".")
            row = _judged_row(path, known)
            general = f"`ALGORITHM.{rest}`" if row[1:] == judged.get(f"grpo.{rest}", ())[1:] else ""
            if general and first in RUN_CONFIGS:
                judged[f"grpo.{rest}"] = (general, *row[1:])
            else:
                judged[path] = row
    unread = ", ".join(f"`{path}`" for path, known in JUDGEMENTS.items() if known.unread)
    renames = _table(("key", "becomes"), renamed)
    alike: dict[_Row, list[str]] = {}
    for path, *rest in judged.values():
        alike.setdefault(tuple(rest), []).append(path)
    rows = ((", ".join(paths), *rest) for rest, paths in alike.items())
    table = _table(("key", "neutral", "another value"), rows)
    return "\n".join(
        (
            _RENAMED_INTRODUCTION,
            renames,
            _UNSUPPORTED_INTRODUCTION,
            table,
            _UNREAD_INTRODUCTION,
            f"{unread}.\n",
        )
    )


def _judged_row(path: str, known: Judgement) -> _Row:
    neutral = [f"`{_yaml(value)}`" for value in known.neutral]
    if known.switched_off:
        neutral.append("`enabled: false`")
    if known.unless:
        neutral.append(f"any without `{known.unless}`")
    if known.same_as:
        neutral.append(f"as `{known.same_as}`")
    return (
        f"`{path}`",
        ", ".join(neutral),
        f"reported: {known.told}" if known.told else f"refused: {known.refused}",
    )


def _yaml(value: object) -> str:
    """Write a value as a recipe does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _combinations() -> str:
    sections = (row for kind in RUN_CONFIGS.values() for row in _rules_of_sections(kind, ""))
    of_policy = (*POLICY_RULES, *ENGINE_RULES)
    policy = ((row, lambda path: join_path("policy", path)) for row in of_policy if isinstance(row, Rule))
    runs = ((row, _place) for row in RUN_RULES if isinstance(row, Rule))
    seen: set[int] = set()
    others: dict[tuple[str, str], list[str]] = {}
    for row, key in (*policy, *runs, *sections):
        if row.code in ("incompatible", "not-supported") and id(row) not in seen:
            seen.add(id(row))
            path, other, why = _combination(row, key)
            others.setdefault((path, why), []).append(other)
    paths: dict[tuple[str, str], list[str]] = {}
    for (path, why), several in sorted(others.items()):
        paths.setdefault((" or ".join(sorted({*several} - {""})), why), []).append(path)
    rows = ((", ".join(several), other, why) for (other, why), several in paths.items())
    return (
        _COMBINATIONS_INTRODUCTION + "\n" + _table(("key", "does not go with", "because, or instead"), rows)
    )


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


def _combination(rule: Rule[Any], key: Key) -> tuple[str, str, str]:
    """Return the key, the related ones, and the reason or else the fix; computed texts are left out."""
    fix = rule.fix
    if isinstance(fix, Mapping):
        fix = " or ".join(f"`{as_yaml(value)}`" for path, value in fix.items() if path == rule.path)
    why = rule.why or rule.says
    return (
        f"`{key(rule.path)}`",
        " with ".join(f"`{key(path)}`" for path in rule.related if path != rule.path),
        why if isinstance(why, str) and why else fix if isinstance(fix, str) else "",
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
