"""References and computations in a recipe's values.

OmegaConf's resolvers are global to the process, and a program may register others under our names. Ours are
registered under different names, which are put into a recipe's text before it is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import Problem, join_path

_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
_MOST = 200
_OURS = "recipe."
_NAMED = re.compile(r"(?<!\\)((?:\\\\)*\$\{\s*)(oc\.env|add|mul|div|max)(?=\s*:)")
_RENAMED = re.compile(rf"(\$\{{\s*){re.escape(_OURS)}")
_COMPUTED = re.compile(r"\$\{[^{}:]*\$\{[^{}]*\}[^{}:]*:")


def register(name: str, resolver: Callable[..., object]) -> None:
    """Register a resolver for `name` in the output of `for_our_resolvers`, in case the program has removed it."""
    OmegaConf.register_new_resolver(_OURS + name, resolver, replace=True)


def for_our_resolvers[Value](value: Value) -> Value:
    """Return a value or tree in which our resolvers have their names registered with OmegaConf."""
    if isinstance(value, str):
        return cast("Value", _NAMED.sub(rf"\1{_OURS}\2", value))
    if isinstance(value, dict):
        section = cast("dict[object, object]", value)
        return cast("Value", {key: for_our_resolvers(one) for key, one in section.items()})
    if isinstance(value, list):
        return cast("Value", [for_our_resolvers(one) for one in cast("list[object]", value)])
    return value


def as_written(value: object) -> object:
    """Undo `for_our_resolvers` in a text; return anything else unchanged."""
    return _RENAMED.sub(r"\1", value) if isinstance(value, str) else value


def unreadable(tree: Mapping[str, object]) -> Problem | None:
    """Return a problem if a value computes a resolver's name or depends on too many references, else None."""
    texts = dict(_texts(tree, ""))
    for path, text in texts.items():
        if _COMPUTED.search(text):
            return Problem("reference", path, f"{text} computes the name of a resolver", "write the name")
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
    """Count the references followed for a value; a reference in a cycle, which OmegaConf reports, is not counted."""
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
