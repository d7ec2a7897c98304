"""The recipe in the making, and what is said of each change."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem, Tree, value_at


class Kind(Enum):
    """What became of a key; the report has a group for each, in this order."""

    RENAMED = "under another name here"
    CHANGED = "changed, as it would mean something else here"
    WARNED = "left out, which changes speed, memory or what is recorded, and no result"
    FILES = "files of prompts, copied next to the recipe"
    REFUSED = "refused, and in the file as comments"
    OPEN = "left for you to settle"


ONLY_OURS = (
    *("data.apply_chat_template", "data.special_tokens_in_content", "data.overlong", "data.imitated"),
    *("grpo.val_greedy", "ppo.val_greedy", "distillation.val_greedy", "loss_fn.tail_mass"),
    *("env.math.response.regex", "env.math.unparsable", "policy.generation.fit_to_sequence"),
    "policy.megatron_cfg.optimizer.decay_norms_and_biases",
)
"""Keys that a migration sets, and that no recipe of NeMo RL has."""


@dataclass(frozen=True)
class Note:
    """One thing to say of a key."""

    kind: Kind
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass
class Draft:
    """A recipe on its way from NeMo RL's keys to ours.

    tree: the recipe, without interpolations. refused: keys that are left out, with their values and what to do.
    dropped: those that say nothing here. problems: why keys were refused. origins: which key of theirs gave which of
    ours. files: those of prompts that were found, by the paths of their keys.
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

    def number(self, path: str) -> int | None:
        """Return the whole number at a path; None for anything else, which is told when the recipe is checked."""
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
        """Take a key out, if it is there, that says nothing here."""
        if self.has(path):
            self.pop(path)
            self.dropped.append(path)

    def rename(self, source: str, target: str, told: str = "") -> None:
        """Move a key to its place here; told: what the report says that it became, if not the new key."""
        self.set(target, self.pop(source))
        self.origins[target] = source
        self.note(Kind.RENAMED, source, told or target)

    def note(self, kind: Kind, path: str, what: str) -> None:
        self.notes.append(Note(kind, path, what))

    def change(self, path: str, value: object, why: str) -> None:
        """Set a key to what its value, or its absence, means here; the file and the report say why.

        One that NeMo RL does not have was written for this package, and stands.
        """
        before = self.get(path)
        if before is not None and path in ONLY_OURS:
            return
        self.set(path, value)
        arrow = "" if before is None else f"{shown(before)} -> "
        self.note(Kind.CHANGED, path, f"{arrow}{shown(value)}; {why}")

    def fill(self, path: str, value: object, why: str) -> None:
        """Set a key that the recipe leaves out."""
        if not self.has(path):
            self.change(path, value, why)

    def refuse(self, path: str, value: object, remedy: str, what: str = "") -> None:
        """Leave a key out that asks for something that is missing here."""
        self.pop(path)
        self.refused[path] = (value, remedy)
        self.problems.append(
            Problem("not-supported", path, what or f"{shown(value)} does not carry over", remedy)
        )
        self.note(Kind.REFUSED, path, f"{shown(value)}; {remedy}" if remedy else shown(value))


def put(tree: Tree, path: str, value: object) -> None:
    """Write a key of a recipe, and the sections above it."""
    *above, last = path.split(".")
    for key in above:
        inner = tree.get(key)
        below = cast("Tree", inner) if isinstance(inner, dict) else Tree()
        tree[key] = below
        tree = below
    tree[last] = value


def shown(value: object) -> str:
    """Return a value as a message names it."""
    if isinstance(value, dict):
        return "enabled: true" if cast("Tree", value).get("enabled") else "this section"
    if isinstance(value, list):
        return "this list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
