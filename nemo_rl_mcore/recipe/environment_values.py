"""Values that a recipe takes from the environment (`${oc.env:KEY}`): read, and kept out of messages."""

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
"""Characters that a shortened value may be cut to in a message."""


# Reading


@dataclass
class _Watch:
    """What was read of the environment for one value; with `stands_in`, marks were given in place of values."""

    stands_in: bool
    reads: list[tuple[str, str, str | None]] = field(default_factory=list[tuple[str, str, "str | None"]])
    """A mark, the reference that it stands for, and the value."""


_watch: ContextVar[_Watch | None] = ContextVar("environment_watch", default=None)
_NONE = object()


def read_environment(key: str, default: object = _NONE) -> str | None:
    """Resolve `${oc.env:KEY,default}` as OmegaConf does, and note that it was asked for."""
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
    """Return a value and, where it rests on the environment, the reference to it; raw: the value as it is written."""
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
    """Return the text with references in the places of values; None where something was computed of the values."""
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
    """Return a saved text with the values that its references have now; None where one has none."""
    if "${" not in text:
        return text
    register("oc.env", read_environment)
    try:
        return str(OmegaConf.create({"value": for_our_resolvers(text)})["value"])
    except OmegaConfBaseException:
        return None


# Showing


def without_values(text: str, references: References, *paths: str) -> str:
    """Return a text for people with references in place of values. paths: the keys that it is about, if any are."""
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
