"""A recipe during its migration, with notes on each change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import Problem, Tree, value_at


class Kind(Enum):
    """Outcomes for a key, in the order of their groups in the report."""

    RENAMED = "renamed"
    CHANGED = "changed, because the meaning differs here"
    WARNED = "left out, with an effect on speed, memory or logs but not on results"
    FILES = "prompt files, copied next to the recipe"
    REFUSED = "refused, and kept in the file as comments"
    OPEN = "left for you to settle"


KEYS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
"""Facts about NeMo RL's keys."""


@dataclass(frozen=True)
class Note:
    """A line of the report on one key."""

    kind: Kind
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass
class Draft:
    """A recipe on its way from NeMo RL's keys to ours.

    tree: the recipe, without interpolations. refused: value and advice of each refused key. dropped: keys without a
    meaning here. origins: NeMo RL's key for each renamed one. files: prompt files by key.
    """

    algorithm: str
    tree: Tree
    notes: list[Note] = field(default_factory=list[Note])
    refused: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])
    dropped: list[str] = field(default_factory=list[str])
    problems: list[Problem] = field(default_factory=list[Problem])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, Path] = field(default_factory=dict[str, Path])

    def get(self, path: str) -> object:
        return value_at(self.tree, path)

    @property
    def asynchronous(self) -> bool:
        """True if rollouts are asynchronous, by our key or NeMo RL's."""
        section = self.section(f"{self.algorithm}.async_{self.algorithm}")
        return bool(section.get("enabled") or self.section("async_rl"))

    def number(self, path: str) -> int | None:
        """Return the integer at a path; None for anything else, which `check` reports."""
        value = self.get(path)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def section(self, path: str) -> Tree:
        value = self.get(path) if path else self.tree
        return cast("Tree", value) if isinstance(value, dict) else {}

    def has(self, path: str) -> bool:
        parent, _, key = path.rpartition(".")
        return key in self.section(parent)

    def set(self, path: str, value: object) -> None:
        put(self.tree, path, value)

    def pop(self, path: str) -> object:
        parent, _, key = path.rpartition(".")
        return self.section(parent).pop(key, None)

    def drop(self, path: str) -> None:
        """Remove a key, if present, that has no meaning here."""
        if self.has(path):
            self.pop(path)
            self.dropped.append(path)

    def rename(self, source: str, target: str, told: str = "") -> None:
        """Move a key; told: replaces the new key as the report's text."""
        self.set(target, self.pop(source))
        self.origins[target] = source
        self.note(Kind.RENAMED, source, told or target)

    def note(self, kind: Kind, path: str, what: str) -> None:
        self.notes.append(Note(kind, path, what))

    def change(self, path: str, value: object, why: str) -> None:
        """Set a key to the equivalent of its value, or of its absence, and note the reason.

        A key that NeMo RL does not have was written for this package, and keeps its value.
        """
        before = self.get(path)
        if before is not None and path in KEYS["only_ours"]:
            return
        self.set(path, value)
        arrow = "" if before is None else f"{shown(before)} -> "
        self.note(Kind.CHANGED, path, f"{arrow}{shown(value)}; {why}")

    def fill(self, path: str, value: object, why: str) -> None:
        """Set a missing key."""
        if not self.has(path):
            self.change(path, value, why)

    def refuse(self, path: str, value: object, remedy: str, what: str = "") -> None:
        """Leave out a key whose feature is missing here."""
        self.pop(path)
        self.refused[path] = (value, remedy)
        what = what or f"{shown(value)} does not carry over"
        self.problems.append(Problem("not-supported", path, what, remedy))
        self.note(Kind.REFUSED, path, f"{shown(value)}; {remedy}" if remedy else shown(value))


def put(tree: Tree, path: str, value: object) -> None:
    """Set a key, creating the sections above it."""
    *above, last = path.split(".")
    for key in above:
        if not isinstance(tree.get(key), dict):
            tree[key] = Tree()
        tree = cast("Tree", tree[key])
    tree[last] = value


def shown(value: object) -> str:
    """Return the value as messages show it."""
    if isinstance(value, dict):
        return "enabled: true" if cast("Tree", value).get("enabled") else "this section"
    if isinstance(value, list):
        return "this list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
