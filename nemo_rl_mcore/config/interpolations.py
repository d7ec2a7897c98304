"""How many references a value of a recipe rests on: each is followed again for each value."""

import re
from collections.abc import Iterator, Mapping
from typing import cast

from nemo_rl_mcore.config.base import Problem, join_path

_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
_MOST = 200


def long_chain(tree: Mapping[str, object]) -> Problem | None:
    """Return what is wrong where a value rests on too many references, one after the other or together."""
    texts = dict(_texts(tree, ""))
    behind = {
        path: [_absolute(path, *found) for found in _REFERENCE.findall(text)] for path, text in texts.items()
    }
    counts: dict[str, int] = {}
    for path in behind:
        if _count(path, behind, counts) > _MOST:
            what = f"{texts[path]} rests on more than {_MOST} references"
            return Problem("reference", path, what, "write the value, or refer to it at once")
    return None


def _count(start: str, behind: Mapping[str, list[str]], counts: dict[str, int]) -> int:
    """Count the references that are followed for a value; one of a cycle, which OmegaConf reports, counts as none."""
    ways, opened = [start], set[str]()
    while ways:
        path = ways[-1]
        if path in counts:
            ways.pop()
        elif path in opened:
            counts[path] = min(_MOST + 1, sum(1 + counts.get(other, 0) for other in behind.get(path, [])))
            ways.pop()
        else:
            opened.add(path)
            ways += [other for other in behind.get(path, []) if other not in opened]
    return counts[start]


def _absolute(path: str, dots: str, name: str) -> str:
    if not dots:
        return name
    above = path.split(".")[: -len(dots)]
    return ".".join([*above, name])


def _texts(node: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        if "${" in node:
            yield path, node
    elif isinstance(node, dict):
        for key, one in cast("dict[object, object]", node).items():
            yield from _texts(one, join_path(path, str(key)))
    elif isinstance(node, list):
        for place, one in enumerate(cast("list[object]", node)):
            yield from _texts(one, join_path(path, str(place)))
