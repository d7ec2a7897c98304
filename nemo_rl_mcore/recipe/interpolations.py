"""References and computations in a recipe's values, and the removal of environment values from messages.

OmegaConf's resolvers are global to the process, and a program may register others under our names. Ours are
registered under different names, which are put into a recipe's text before it is read.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from nemo_rl_mcore.config.base import Problem, Tree, join_path
from nemo_rl_mcore.config.run_config import HIDDEN_ANYWHERE, Reference, References

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


def as_written(parent: DictConfig | ListConfig, key: str | int) -> object:
    """Return a value as the recipe has it, without the changes of `for_our_resolvers`."""
    value = cast("dict[str | int, object]", OmegaConf.to_container(parent, resolve=False))[key]
    return _RENAMED.sub(r"\1", value) if isinstance(value, str) else value


def unreadable(tree: Mapping[str, object]) -> Problem | None:
    """Return a problem if a value computes a resolver's name or depends on too many references, else None."""
    texts, behind, counts = dict(_texts(tree, "")), dict[str, list[str]](), dict[str, int]()
    for path, text in texts.items():
        if _COMPUTED.search(text):
            return Problem("reference", path, f"{text} computes the name of a resolver", "write the name")
        above = path.split(".")
        behind[path] = [
            ".".join([*above[: -len(dots)], name]) if dots else name
            for dots, name in _REFERENCE.findall(text)
        ]
    for path in behind:
        if _count(path, behind, counts) > _MOST:
            what = f"{texts[path]} depends on more than {_MOST} references"
            return Problem("reference", path, what, "write the value, or refer to it directly")
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


_SHOWN = (57, 60, 297)
"""Lengths to which a value may be shortened in a message."""


@dataclass
class _Watch:
    """Environment reads for one value; with `stands_in`, marks are returned in place of values."""

    stands_in: bool
    reads: list[tuple[str, str, str | None]] = field(default_factory=list[tuple[str, str, "str | None"]])
    """Tuples of mark, reference and value."""


_watch: ContextVar[_Watch | None] = ContextVar("environment_watch", default=None)
_NONE = object()


def read_environment(key: str, default: object = _NONE) -> str | None:
    """Resolve `${oc.env:KEY,default}` as OmegaConf does, and record the access."""
    value = oc.env(key) if default is _NONE else oc.env(key, default)
    watch = _watch.get()
    if watch is None:
        return value
    written = "" if default is _NONE else ",null" if default is None else f",{default}"
    if isinstance(default, str):
        escaped = default.replace("\\", "\\\\").replace("'", "\\'")
        written = f",'{escaped}'"
    mark = f"\0env{len(watch.reads)}\0"
    watch.reads.append((mark, f"${{oc.env:{key}{written}}}", value))
    return mark if watch.stands_in and value is not None else value


def read_value(read: Callable[[], object], raw: Callable[[], object]) -> tuple[object, Reference | None]:
    """Return a value and, if it depends on the environment, its reference; raw: returns the value as written."""
    with _watching(stands_in=False) as watch:
        value = read()
    if not watch.reads:
        return value, None
    plain: object = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return value, Reference(_with_marks(read, plain) or str(raw()), plain)


@contextmanager
def _watching(*, stands_in: bool) -> Generator[_Watch]:
    token = _watch.set(_Watch(stands_in))
    try:
        yield cast("_Watch", _watch.get())
    finally:
        _watch.reset(token)


def _with_marks(read: Callable[[], object], value: object) -> str | None:
    """Return the text with references in place of values; None if it was computed from the values."""
    with _watching(stands_in=True) as watch:
        try:
            text = read()
        except (OmegaConfBaseException, RecursionError):
            return None
    if not isinstance(text, str):
        return None
    filled = referring = text
    for mark, reference, one in reversed(watch.reads):
        filled, referring = filled.replace(mark, str(one)), referring.replace(mark, reference)
    return referring if filled == value else None


def value_now(text: str) -> str | None:
    """Return a saved text with its references' current values; None if a reference has no value."""
    if "${" not in text:
        return text
    register("oc.env", read_environment)
    try:
        return str(OmegaConf.create({"value": for_our_resolvers(text)})["value"])
    except OmegaConfBaseException:
        return None


def without_values(text: str, references: References, *paths: str) -> str:
    """Return a message with references in place of values; paths: the keys that it concerns, if any."""
    for key, reference in references.items():
        judged = any(path and f"{key}.".startswith(f"{path}.") for path in paths)
        for one in _inner(reference.value):
            if len(one) >= (1 if judged else HIDDEN_ANYWHERE):
                quoted = repr(one)
                cut = [
                    f"{form[:width]}..." for form in (quoted, one) for width in _SHOWN if len(form) > width
                ]
                for form in (quoted, one, quoted[1:-1], *cut):
                    text = text.replace(form, reference.text)
    return text


def _inner(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(cast("Tree", value).values())
    if isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _inner(one)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
