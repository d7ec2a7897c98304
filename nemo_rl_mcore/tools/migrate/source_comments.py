"""The comments of a recipe by the keys that they stand at, which a YAML reader throws away."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from nemo_rl_mcore.recipe.sources import key_lines

_BESIDE = re.compile(r"\s+(#.*)")
_BESIDE_SECTION = re.compile(r"[^#'\"]*:\s+(#.*)")


@dataclass(frozen=True)
class SourceComment:
    """What stands above a key, line by line from its `#` on, and what stands after its value on the same line."""

    above: tuple[str, ...]
    beside: str


def comments_of(files: Iterable[Path]) -> dict[str, SourceComment]:
    """Return the comments of each key that has some; of several files the strongest, the last, has its way."""
    found: dict[str, SourceComment] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        node = yaml.SafeLoader(text).get_single_node()
        for key, line, value in key_lines(node, ""):
            comment = SourceComment(_above(lines, line - 1), _beside(lines, line - 1, value))
            if comment.above or comment.beside:
                found[key] = comment
    return found


def _above(lines: list[str], place: int) -> tuple[str, ...]:
    first = place
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return tuple(line.strip() for line in lines[first:place])


def _beside(lines: list[str], place: int, value: yaml.Node) -> str:
    """Return a comment after a value that ends on the line of its key, or after the name of a section."""
    end = cast("yaml.Mark", value.end_mark)
    if isinstance(value, yaml.MappingNode) and not value.flow_style:
        found = _BESIDE_SECTION.fullmatch(lines[place])
    else:
        found = _BESIDE.fullmatch(lines[place], end.column) if end.line == place else None
    return found[1] if found else ""
