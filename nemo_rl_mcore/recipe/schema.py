"""What the models know about themselves: the keys of a section, what a field allows, the nearest key."""

import difflib
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_rl_mcore.config.base import StrictModel, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS, GRPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig

Kind = type[RunConfig]


@cache
def fields(kind: Kind = GRPOMasterConfig) -> dict[str, FieldInfo]:
    """Return every field of a recipe by its YAML path; recipes of each algorithm are a kind of their own."""
    found: dict[str, FieldInfo] = {}
    _walk(kind, "", found)
    return found


def _walk(section: type[StrictModel], prefix: str, found: dict[str, FieldInfo]) -> None:
    for name, field in section.model_fields.items():
        path = join_path(prefix, name)
        found[path] = field
        if inner := section_of(field):
            _walk(inner, join_path(path, ANY_NAME) if holds_names(field) else path, found)


ANY_NAME = "NAME"
"""Stands in the path of a field for a name of the user's own."""


def section_of(field: FieldInfo) -> type[StrictModel] | None:
    """Return the class of the sections that a field holds: one, null or not, a list or names; None for plain values."""
    return _section_in(field.annotation)


def _section_in(annotation: object) -> type[StrictModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    found = (_section_in(option) for option in cast("tuple[object, ...]", get_args(annotation)))
    return next((section for section in found if section is not None), None)


def holds_names(field: FieldInfo) -> bool:
    """Return whether a field holds sections by names of the user's own."""
    return get_origin(field.annotation) is dict and section_of(field) is not None


def field_path(path: str, kind: Kind = GRPOMasterConfig) -> str:
    """Return the path of the field behind a path of a recipe: without places in lists, and with NAME for a name."""
    found = ""
    for part in path.split("."):
        field = fields(kind).get(found)
        if field is not None and holds_names(field):
            found = join_path(found, ANY_NAME)
        elif not part.isdecimal():
            found = join_path(found, part)
    return found


def field_at(path: str, kind: Kind = GRPOMasterConfig) -> FieldInfo | None:
    """Return the field that a path of a recipe leads to."""
    return fields(kind).get(field_path(path, kind))


def is_known(path: str, kind: Kind = GRPOMasterConfig) -> bool:
    """Return whether a key exists in the recipes of an algorithm."""
    path = field_path(path, kind)
    return path in fields(kind) or path.endswith(f".{ANY_NAME}")


def suggestion(path: str, kind: Kind = GRPOMasterConfig) -> str:
    """Return the sentence that leads from an unknown key to a known one."""
    if path in RUN_CONFIGS:
        return (
            f"a recipe has one algorithm, and this one's is {kind.algorithm}; remove one of the two sections"
        )
    nearest = nearest_path(path, kind)
    parent, _, _ = path.rpartition(".")
    if nearest is None:
        here = ", ".join(_children(parent, kind)) or "none"
        return f"known keys of {parent or 'the recipe'}: {here}"
    same_section = nearest.rpartition(".")[0] == parent
    return f"did you mean {nearest.rpartition('.')[2] if same_section else nearest}?"


def nearest_path(path: str, kind: Kind = GRPOMasterConfig) -> str | None:
    """Return the known path that an unknown one was most likely meant to be, if any is near."""
    parent, _, key = path.rpartition(".")
    siblings = difflib.get_close_matches(key, _children(parent, kind), n=1, cutoff=0.7)
    if siblings:
        return join_path(parent, siblings[0])
    elsewhere = [known for known in fields(kind) if known.rpartition(".")[2] == key]
    if elsewhere:
        return min(elsewhere, key=lambda known: -_shared(known, path))
    # Not its siblings, which a shared section would make similar whatever their own names.
    others = [
        known
        for known in fields(kind)
        if not path.startswith(f"{known}.") and known.rpartition(".")[0] != parent
    ]
    similar = difflib.get_close_matches(path, others, n=1, cutoff=0.85)
    return similar[0] if similar else None


def path_ending_in(name: str, kind: Kind) -> str | None:
    """Return the known path whose last key is nearest to a name, if any is near; one of the algorithm first."""
    by_key: dict[str, list[str]] = {}
    for path in fields(kind):
        by_key.setdefault(path.rpartition(".")[2], []).append(path)
    near = difflib.get_close_matches(name, by_key, n=1, cutoff=0.7)
    return min(by_key[near[0]], key=lambda path: not path.startswith(kind.algorithm)) if near else None


def _shared(first: str, second: str) -> int:
    same = [a == b for a, b in zip(first.split("."), second.split("."), strict=False)]
    return same.index(False) if False in same else len(same)


def _children(parent: str, kind: Kind) -> list[str]:
    # A misspelt section has no children of its own: they are those of the section it was meant to be.
    parent = field_path(parent, kind)
    return [known.rpartition(".")[2] for known in fields(kind) if known.rpartition(".")[0] == parent]


def allowed(field: FieldInfo) -> str:
    """Return what a field allows, in words."""
    return _describe(field.annotation, tuple(field.metadata))


def _describe(annotation: Any, metadata: tuple[object, ...]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        nested = (extra.metadata if isinstance(extra, FieldInfo) else [extra] for extra in more)
        return _describe(inner, (*metadata, *chain.from_iterable(nested)))
    if origin in (Union, UnionType):
        return " or ".join(_describe(option, metadata) for option in get_args(annotation))
    if origin is Literal:
        return ", ".join(str(option) for option in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return "a section"
    kind = cast("object", origin or annotation)
    return _NAMES.get(kind, str(kind)) + _bounds(metadata)


_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list",
    dict: "a section",
    NoneType: "null",
}

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(metadata: tuple[object, ...]) -> str:
    limits = [
        f"{words} {limit}" if isinstance(limit := getattr(item, name), int) else f"{words} {limit:g}"
        for item in metadata
        for name, words in _BOUNDS.items()
        if hasattr(item, name)
    ]
    return f", {' and '.join(limits)}" if limits else ""


def field_help(path: str, kind: Kind = GRPOMasterConfig) -> str:
    """Return the beginning of a field's description without its full stop; an ellipsis at its end stays."""
    field = field_at(path, kind)
    description = " ".join(((field.description if field else None) or "").partition("\n\n")[0].split())
    return description if description.endswith("...") else description.removesuffix(".")
