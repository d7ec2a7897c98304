"""Our recipe as a file: sections in our order, interpolations where they still hold, and comments."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import cast

import yaml

from nemo_rl_mcore.config.base import Tree, join_path, value_at
from nemo_rl_mcore.recipe.environment_values import without_values
from nemo_rl_mcore.recipe.schema import field_path, fields
from nemo_rl_mcore.tools.migrate.brevity import REFERENCE, without_defaults
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.migrate import Migrated
from nemo_rl_mcore.tools.migrate.source_comments import SourceComment, comments_of

_RESOLVERS = re.compile(r"\$\{(?:mul|add|div|max):")
_WIDTH = 112
_NO_COMMENT = SourceComment((), "")
_ORDER = (
    *("seed", "grpo", "ppo", "dpo", "sft", "distillation", "loss_fn", "value", "value_loss_fn", "teacher"),
    *("policy", "data", "env", "eval", "checkpointing", "logger", "cluster"),
)


def recipe_text(migrated: Migrated, source: str, overrides: Iterable[str] = ()) -> str:
    """Return the YAML, ending with a line feed; `source` names the recipe that it was made of, with these overrides."""
    tree, left_out = without_defaults(migrated.draft, migrated.written)
    made = f"Made by `nemo-rl-mcore migrate` of NeMo RL's {' '.join([source, *overrides])}."
    lines = (
        without_values(line, migrated.read.references) if line.lstrip().startswith("#") else line
        for line in (*_comment(made, ""), *_head(migrated.draft, left_out), *_Writer(migrated, tree).lines())
    )
    return "\n".join(lines) + "\n"


_AT_KEYS = (Kind.REFUSED, Kind.CHANGED)
"""Groups of which the file says at each key what its head would say of it."""


def _head(draft: Draft, left_out: int) -> Iterator[str]:
    for kind in (Kind.OPEN, Kind.REFUSED, Kind.CHANGED, Kind.WARNED, Kind.FILES):
        notes = [note for note in draft.notes if note.kind is kind]
        if not notes:
            continue
        title = f"{kind.value[:1].upper()}{kind.value[1:]}: {len(notes)}"
        in_full = kind not in _AT_KEYS
        yield from ("#", f"# {title}" if in_full else f"# {title}, with the reason at each key")
        texts = [str(note) for note in notes] if in_full else [", ".join(note.path for note in notes)]
        for text in texts:
            yield from _comment(text, "", "  ")
    yield "#"
    idle = f"{len(draft.dropped)} keys at values that change nothing here"
    said = f"{idle}, {left_out} at this package's defaults"
    yield from _comment(f"Not written: {said}.", "")


class _Writer:
    def __init__(self, migrated: Migrated, tree: Tree) -> None:
        self._migrated, self._tree = migrated, tree
        self._comments, self._refused = _comments(migrated.draft), dict(migrated.draft.refused)
        self._theirs = comments_of(migrated.read.recipe.files)

    def lines(self) -> Iterator[str]:
        yield from self._section(self._tree, "", 0)

    def _section(self, section: Tree, path: str, depth: int) -> Iterator[str]:
        indent = "  " * depth
        for key in sorted(section, key=lambda key: self._place(join_path(path, key), key)):
            inner = join_path(path, key)
            if not depth:
                yield ""
            theirs = self._theirs.get(self._migrated.draft.origins.get(inner, inner), _NO_COMMENT)
            yield from (f"{indent}{line}" for line in theirs.above)
            yield from _comment(self._comments.get(inner, ""), indent)
            beside = f"  {theirs.beside}" if theirs.beside else ""
            below = self._below(inner)
            if below or (self._refusals(inner) and not isinstance(section[key], list)):
                yield f"{indent}{key}:{beside}"
                yield from self._section(below, inner, depth + 1)
            else:
                yield f"{indent}{key}: {_inline(self._written(inner, section[key]))}{beside}"
            for refused in self._refusals(inner):
                yield from self._refusal(refused, indent + "  ")
        if not depth:
            for refused in [*self._refused]:
                yield from ("", *self._refusal(refused, ""))

    def _below(self, path: str) -> Tree:
        value = value_at(self._tree, path)
        return cast("Tree", value) if isinstance(value, dict) else {}

    def _place(self, path: str, key: str) -> tuple[int, str]:
        """Return where a key stands among its neighbours: as in the class of its section."""
        if "." not in path:
            return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)
        inside = field_path(path.rpartition(".")[0], self._migrated.kind)
        names = [name for name in fields(self._migrated.kind) if name.rpartition(".")[0] == inside]
        return (names.index(path) if path in names else len(names), key)

    def _refusals(self, section: str) -> list[str]:
        """Return the refused keys whose nearest section in the file this is."""
        found = [path for path in self._refused if path.startswith(f"{section}.")]
        values = self._below(section)
        inner = [key for key, value in values.items() if isinstance(value, dict)]
        return [p for p in found if not any(p.startswith(f"{section}.{key}.") for key in inner)]

    def _refusal(self, path: str, indent: str) -> Iterator[str]:
        value, remedy = self._refused.pop(path)
        text = yaml.safe_dump({path.rpartition(".")[2]: value}, sort_keys=False, width=_WIDTH)
        yield from (f"{indent}{line}" for line in self._theirs.get(path, _NO_COMMENT).above)
        yield from _comment(f"Refused, {path}: {remedy}", indent)
        yield from (f"{indent}# {line}" for line in text.splitlines())

    def _written(self, path: str, value: object) -> object:
        """Return a value as theirs was written, where that still gives the same one."""
        given, known = value_at(self._migrated.written, path), value_at(self._migrated.read.tree, path)
        if not isinstance(given, str) or "${" not in given or known != value:
            return value
        references = REFERENCE.findall(given)
        left = REFERENCE.sub("", _RESOLVERS.sub("", given))
        holds = all(
            value_at(self._tree, other) == value_at(self._migrated.read.tree, other) is not None
            for other in references
        )
        return _Interpolation(given) if references and holds and "${" not in left else value


class _Interpolation(str):
    """Text that YAML needs no quotes for."""


def _inline(value: object) -> str:
    if isinstance(value, _Interpolation):
        return str(value)
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True
    )
    return text.strip().removesuffix("...").strip()


def _comments(draft: Draft) -> dict[str, str]:
    """Return what is said at a key: of one that changed in a list or by another key's reason, what the report says."""
    notes = {note.path: f"{note.what}." for note in draft.notes if note.kind is Kind.CHANGED}
    return notes | draft.comments


def _comment(text: str, indent: str, inner: str = "") -> Iterator[str]:
    width = _WIDTH - len(indent) - 2
    for line in textwrap.wrap(text, width, initial_indent=inner, subsequent_indent=inner and f"{inner}  "):
        yield f"{indent}# {line}"
