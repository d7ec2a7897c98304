"""Values that a recipe reads from the environment (`${oc.env:KEY}`), and their removal from messages."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.run_config import HIDDEN_ANYWHERE, Reference, References
from nemo_rl_mcore.recipe.interpolations import for_our_resolvers, register

_SHOWN = (57, 60, 297)
"""Lengths to which a value may be shortened in a message."""


# Reading


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
    mark = f"\0env{len(watch.reads)}\0"
    watch.reads.append((mark, f"${{oc.env:{key}{_written_default(default)}}}", value))
    return mark if watch.stands_in and value is not None else value


def _written_default(default: object) -> str:
    if default is _NONE:
        return ""
    if not isinstance(default, str):
        return ",null" if default is None else f",{default}"
    escaped = default.replace("\\", "\\\\").replace("'", "\\'")
    return f",'{escaped}'"


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


# Showing


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
