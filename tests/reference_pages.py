"""The reference of all keys, generated from the models and the table of unsupported keys.

    python tests/reference_pages.py docs/reference

writes the pages. The text around their tables is in reference_pages.yaml.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from nemo_rl_mcore.config.base import Key, Rule, StrictModel, as_yaml, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.driver.run_folder import shown_value
from nemo_rl_mcore.recipe.rules.generation import ENGINE_RULES
from nemo_rl_mcore.recipe.rules.policies import POLICY_RULES
from nemo_rl_mcore.recipe.rules.runs import RUN_RULES
from nemo_rl_mcore.recipe.schema import allowed, section_of
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, RENAMED

_PAGES_OF_THEIR_OWN = ("policy.model", "policy.megatron_cfg", "policy.generation", "policy", "data", "env")
"""Sections that are long enough for a page, the inner ones first; the others of all recipes are in the index."""
_PLACES = {"loop": "ALGORITHM", "asynchrony": "ALGORITHM.ASYNC", "gradient": "loss_fn"}
"""Names on a page for the paths of rules that depend on the algorithm."""
_LIKE = 4
"""Rows in common that make a section a repeat of an earlier one, to which it links."""
_SHORT = {
    "an integer": "integer",
    "a number": "number",
    "a string": "string",
    " of at least ": " ≥ ",
    "at least ": "≥ ",
    "at most ": "≤ ",
    "above ": "> ",
    "below ": "< ",
    "true or false": "bool",
    ", or null": ", null",
    " or null": ", null",
}

type _Row = tuple[str, ...]
type _Section = tuple[str, str, list[_Row]]
"""A section's path, its purpose, and the rows of its own keys."""


def reference_pages() -> dict[str, str]:
    """Return the pages as Markdown, by the names of their files; each ends with a line feed."""
    pages: dict[str, list[_Section]] = {}
    for path, section in _sections(RunConfig, ""):
        own = (page for page in _PAGES_OF_THEIR_OWN if path == page or path.startswith(f"{page}."))
        pages.setdefault(next(own, "index"), []).append((path, *_purpose_and_rows(section)))
    # The sections that recipes of each algorithm have besides those of all; those with equal keys are one.
    paths: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
    for algorithm, kind in RUN_CONFIGS.items():
        for path, section in _sections(kind, ""):
            if path and path.partition(".")[0] not in RunConfig.model_fields:
                purpose, rows = _purpose_and_rows(section)
                label = f"{path}` of `{algorithm}" if path.startswith("loss_fn") else path
                paths.setdefault((purpose, tuple(rows)), []).append(label)
    pages["algorithms"] = [
        ("`, `".join(labels), purpose, [*rows]) for (purpose, rows), labels in paths.items()
    ]
    titles = {
        name: ", ".join(f"`{path}`" for path, *_ in sections if path == name or (path and "." not in path))
        for name, sections in pages.items()
    }
    contents = [(f"[{name}]({name}.md)", title) for name, title in titles.items() if name != "index"]
    contents.append(("[nemo_rl](nemo_rl.md)", "keys of NeMo RL that are renamed, refused or ignored"))
    contents.append(("[combinations](combinations.md)", "refused combinations"))
    contents.append(("this page", titles["index"]))
    shown: list[tuple[str, list[_Row]]] = []
    texts = {
        name: "\n".join(_text(name, section, shown) for section in sections)
        for name, sections in pages.items()
    }
    heads: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    heads["index"] = heads["index"].format(contents=_table(("page", "sections"), contents))
    whole = {name: f"{heads.get(name) or f'# Keys of `{name}`\n'}\n{text}" for name, text in texts.items()}
    whole["nemo_rl"] = heads["nemo_rl"].format(
        renamed=_table(("key", "becomes"), ((f"`{theirs}`", f"`{own}`") for theirs, own in RENAMED.items())),
        judged=_table(("key", "neutral", "another value"), _judged_rows()),
        unread=", ".join(f"`{path}`" for path, known in JUDGEMENTS.items() if known.unread),
    )
    columns = ("key", "cannot be combined with", "because, or instead")
    whole["combinations"] = heads["combinations"].format(combinations=_table(columns, _combinations()))
    return {f"{name}.md": text for name, text in whole.items()}


def _sections(model: type[StrictModel], path: str) -> Iterator[tuple[str, type[StrictModel]]]:
    """Yield a section and those inside it; those of sources stand once, below data.train."""
    yield path, model
    for name, field in model.model_fields.items():
        section, inside = section_of(field), join_path(path, name)
        if section is not None and (section is not SourceConfig or inside == "data.train"):
            yield from _sections(section, inside)


def _purpose_and_rows(model: type[StrictModel]) -> tuple[str, list[_Row]]:
    rows = list[_Row]()
    for name, field in model.model_fields.items():
        if (section := section_of(field)) is not None and section == field.annotation:
            continue
        values = allowed(field)
        for long, short in _SHORT.items():
            values = values.replace(long, short)
        if field.is_required():
            value = f"required: {values}"
        elif field.default is None:
            value = f"`null` or {values.removesuffix(', null')}"
        else:
            value = f"`{shown_value(field.default)}`" + ("" if values == "bool" else f"; {values}")
        rows.append((f"`{name}`", value, " ".join((field.description or "").split())))
    return inspect.getdoc(model) or "", rows


def _text(page: str, section: _Section, shown: list[tuple[str, list[_Row]]]) -> str:
    """Return a section with its table, or with the rows by which it differs from an earlier one.

    shown: a link to each earlier section, and its rows; this one is added.
    """
    path, purpose, rows = section
    columns = ("key", "default; allowed", "meaning")
    heading = f"`{path}`" if path else "Top level"
    parts = [f"## {heading}", purpose]
    likest, alike = max(
        ((one, len({*one[1]} & {*rows})) for one in shown), key=lambda pair: pair[1], default=(None, 0)
    )
    if likest is None or alike < _LIKE:
        parts.append(_table(columns, rows))
    else:
        link, before = likest
        names = {row[0] for row in rows}
        common = ", ".join(row[0] for row in rows if row in before)
        without = ", ".join(row[0] for row in before if row[0] not in names)
        differing = [row for row in rows if row not in before]
        all_but = f"The keys of {link}" + (f" without {without}" if without else "")
        as_there = all_but if len(all_but) < len(common) else f"{common} as in {link}"
        parts.append(as_there + (", and:\n\n" + _table(columns, differing) if differing else ".\n"))
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    shown.append((f"[{heading}]({page}.md#{anchor})", rows))
    return "\n\n".join(parts)


def _judged_rows() -> Iterator[_Row]:
    """Yield the keys without a counterpart; those with the same judgement share a row."""
    judged: dict[str, _Row] = {}
    for path, known in JUDGEMENTS.items():
        if known.unread:
            continue
        neutral = [f"`{shown_value(value)}`" for value in known.neutral]
        neutral += ["`enabled: false`"] if known.switched_off else []
        neutral += [f"any without `{known.unless}`"] if known.unless else []
        neutral += [f"as `{known.same_as}`"] if known.same_as else []
        another = f"reported: {known.told}" if known.told else f"refused: {known.refused}"
        row, (first, _, rest) = (", ".join(neutral), another), path.partition(".")
        if first in RUN_CONFIGS and row == judged.get(f"grpo.{rest}", ())[1:]:
            judged[f"grpo.{rest}"] = (f"`ALGORITHM.{rest}`", *row)
        else:
            judged[path] = (f"`{path}`", *row)
    alike: dict[_Row, list[str]] = {}
    for path, *rest in judged.values():
        alike.setdefault(tuple(rest), []).append(path)
    for rest, paths in alike.items():
        yield ", ".join(paths), *rest


def _combinations() -> Iterator[_Row]:
    def place(path: str) -> str:
        first, dot, rest = path.partition(".")
        return f"{_PLACES.get(first, first)}{dot}{rest}"

    def below(section: str) -> Key:
        return lambda path: join_path(section, path)

    rules: list[tuple[object, Key]] = [(row, below("policy")) for row in (*POLICY_RULES, *ENGINE_RULES)]
    rules += [(row, place) for row in RUN_RULES]
    for kind in RUN_CONFIGS.values():
        rules += [(row, below(path)) for path, section in _sections(kind, "") for row in section.rules]
    seen: set[int] = set()
    others: dict[tuple[str, str], list[str]] = {}
    for row, key in rules:
        if not isinstance(row, Rule) or row.code not in ("incompatible", "not-supported") or id(row) in seen:
            continue
        seen.add(id(row))
        # The reason, or else the fix; computed texts are left out.
        fix, why = row.fix, row.why or row.says
        if isinstance(fix, Mapping):
            fix = " or ".join(f"`{as_yaml(value)}`" for path, value in fix.items() if path == row.path)
        told = why if isinstance(why, str) and why else fix if isinstance(fix, str) else ""
        related = " with ".join(f"`{key(path)}`" for path in row.related if path != row.path)
        others.setdefault((f"`{key(row.path)}`", told), []).append(related)
    paths: dict[tuple[str, str], list[str]] = {}
    for (path, why), several in sorted(others.items()):
        paths.setdefault((" or ".join(sorted({*several} - {""})), why), []).append(path)
    for (other, why), several in paths.items():
        yield ", ".join(several), other, why


def _table(headings: tuple[str, ...], rows: Iterable[_Row]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    if len(lines) == 2:
        lines.append(("none", *("",) * (len(headings) - 1)))
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in reference_pages().items():
        (folder / name).write_text(text, "utf-8")
