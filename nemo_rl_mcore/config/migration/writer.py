"""Our recipe as a file: sections in our order, interpolations where they still hold, and comments."""

import re
import textwrap
from collections.abc import Iterator

import yaml

from nemo_rl_mcore.config.base import Tree, join_path, value_at
from nemo_rl_mcore.config.environment_values import without_values
from nemo_rl_mcore.config.migration.migrate import Migrated
from nemo_rl_mcore.config.schema import field_path, fields

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_RESOLVERS = re.compile(r"\$\{(?:mul|add|div|max):")
_WIDTH = 112
_ORDER = (
    *("seed", "grpo", "ppo", "dpo", "sft", "distillation", "loss_fn", "value", "value_loss_fn", "teacher"),
    *("policy", "data", "env", "eval", "checkpointing", "logger", "cluster"),
)


def recipe_text(migrated: Migrated, source: str) -> str:
    """The YAML, ending with a line feed; `source` names the recipe that it was made of."""
    head = _comment(f"Made by `nemo-rl-mcore migrate` of NeMo RL's {source}.", "")
    lines = (
        without_values(line, migrated.read.references) if line.lstrip().startswith("#") else line
        for line in _Writer(migrated).lines()
    )
    return "\n".join([*head, *lines]) + "\n"


class _Writer:
    def __init__(self, migrated: Migrated) -> None:
        self._migrated, self._tree = migrated, migrated.draft.tree
        self._comments, self._refused = migrated.draft.comments, dict(migrated.draft.refused)

    def lines(self) -> Iterator[str]:
        yield from self._section(self._tree, "", 0)

    def _section(self, section: Tree, path: str, depth: int) -> Iterator[str]:
        indent = "  " * depth
        for key in sorted(section, key=lambda key: self._place(join_path(path, key), key)):
            inner = join_path(path, key)
            if not depth:
                yield ""
            yield from _comment(self._comments.get(inner, ""), indent)
            below = self._migrated.draft.section(inner)
            if below or self._refusals(inner):
                yield f"{indent}{key}:"
                yield from self._section(below, inner, depth + 1)
                for refused in self._refusals(inner):
                    yield from self._refusal(refused, indent + "  ")
            else:
                yield f"{indent}{key}: {_inline(self._written(inner, section[key]))}"
        if not depth:
            for refused in [*self._refused]:
                yield from ("", *self._refusal(refused, ""))

    def _place(self, path: str, key: str) -> tuple[int, str]:
        """Where a key stands among its neighbours: as in the class of its section."""
        if "." not in path:
            return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)
        inside = field_path(path.rpartition(".")[0], self._migrated.kind)
        names = [name for name in fields(self._migrated.kind) if name.rpartition(".")[0] == inside]
        return (names.index(path) if path in names else len(names), key)

    def _refusals(self, section: str) -> list[str]:
        """The refused keys whose nearest section in the file this is."""
        found = [path for path in self._refused if path.startswith(f"{section}.")]
        values = self._migrated.draft.section(section)
        inner = [key for key, value in values.items() if isinstance(value, dict)]
        return [p for p in found if not any(p.startswith(f"{section}.{key}.") for key in inner)]

    def _refusal(self, path: str, indent: str) -> Iterator[str]:
        value, remedy = self._refused.pop(path)
        text = yaml.safe_dump({path.rpartition(".")[2]: value}, sort_keys=False, width=_WIDTH)
        yield from _comment(f"Refused, {path}: {remedy}", indent)
        yield from (f"{indent}# {line}" for line in text.splitlines())

    def _written(self, path: str, value: object) -> object:
        """A value as theirs was written, where that still gives the same one."""
        given, known = value_at(self._migrated.written, path), value_at(self._migrated.read.tree, path)
        if not isinstance(given, str) or "${" not in given or known != value:
            return value
        references = _REFERENCE.findall(given)
        left = _REFERENCE.sub("", _RESOLVERS.sub("", given))
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


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"
