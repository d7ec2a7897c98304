"""The schema of recipes: a section's keys, a field's allowed values, and the nearest key to an unknown name."""

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
    """Return every field of a recipe by YAML path; kind: the algorithm's recipe class."""
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
"""Placeholder in a field's path for a name of the user's choice."""


def section_of(field: object) -> type[StrictModel] | None:
    """Return the class of a field's section or sections, in a list or by name; None for plain values.

    field: a FieldInfo, or its type.
    """
    annotation = field.annotation if isinstance(field, FieldInfo) else field
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    for option in cast("tuple[object, ...]", get_args(annotation)):
        if (section := section_of(option)) is not None:
            return section
    return None


def holds_names(field: FieldInfo) -> bool:
    """Return True if a field holds sections by names of the user's choice."""
    return get_origin(field.annotation) is dict and section_of(field) is not None


def field_path(path: str, kind: Kind = GRPOMasterConfig) -> str:
    """Return the field's path for a recipe path: without list indices, and with NAME for a user's name."""
    found = ""
    for part in path.split("."):
        field = fields(kind).get(found)
        if field is not None and holds_names(field):
            found = join_path(found, ANY_NAME)
        elif not part.isdecimal():
            found = join_path(found, part)
    return found


def field_at(path: str, kind: Kind = GRPOMasterConfig) -> FieldInfo | None:
    return fields(kind).get(field_path(path, kind))


def is_known(path: str, kind: Kind = GRPOMasterConfig) -> bool:
    path = field_path(path, kind)
    return path in fields(kind) or path.endswith(f".{ANY_NAME}")


def suggestion(path: str, kind: Kind = GRPOMasterConfig) -> str:
    """Return advice for an unknown key."""
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
    """Return the known path closest to an unknown path; None if none is near."""
    parent, _, key = path.rpartition(".")
    siblings = difflib.get_close_matches(key, _children(parent, kind), n=1, cutoff=0.7)
    if siblings:
        return join_path(parent, siblings[0])
    elsewhere = [known for known in fields(kind) if known.rpartition(".")[2] == key]
    if elsewhere:
        return min(elsewhere, key=lambda known: -_shared(known, path))
    # Exclude siblings, whose paths are similar because of the shared section, whatever their names.
    others = [
        known
        for known in fields(kind)
        if not path.startswith(f"{known}.") and known.rpartition(".")[0] != parent
    ]
    similar = difflib.get_close_matches(path, others, n=1, cutoff=0.85)
    return similar[0] if similar else None


def path_ending_in(name: str, kind: Kind) -> str | None:
    """Return the known path whose last key is closest to a name, preferably the algorithm's; None if none is near."""
    by_key: dict[str, list[str]] = {}
    for path in fields(kind):
        by_key.setdefault(path.rpartition(".")[2], []).append(path)
    near = difflib.get_close_matches(name, by_key, n=1, cutoff=0.7)
    return min(by_key[near[0]], key=lambda path: not path.startswith(kind.algorithm)) if near else None


def _shared(first: str, second: str) -> int:
    same = [a == b for a, b in zip(first.split("."), second.split("."), strict=False)]
    return same.index(False) if False in same else len(same)


def _children(parent: str, kind: Kind) -> list[str]:
    # A misspelt section has no known children; use the children of the section that was meant.
    parent = field_path(parent, kind)
    return [known.rpartition(".")[2] for known in fields(kind) if known.rpartition(".")[0] == parent]


def allowed(annotation: Any, metadata: tuple[object, ...] = ()) -> str:
    """Return a field's allowed values in words; annotation: the FieldInfo, or a type with its metadata."""
    if isinstance(annotation, FieldInfo):
        annotation, metadata = annotation.annotation, (*metadata, *annotation.metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        nested = (extra.metadata if isinstance(extra, FieldInfo) else [extra] for extra in more)
        return allowed(inner, (*metadata, *chain.from_iterable(nested)))
    if origin in (Union, UnionType):
        options = [allowed(option, metadata) for option in get_args(annotation)]
        plain = all(option in _NAMES.values() for option in options)
        return (" or " if plain else ", or ").join(options)
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
    str: "a string",
    tuple: "a list",
    dict: "a section",
    NoneType: "null",
}

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(metadata: tuple[object, ...]) -> str:
    limits: dict[str, str] = {
        name: str(limit) if isinstance(limit := getattr(item, name), int) else f"{limit:g}"
        for item in metadata
        for name in _BOUNDS
        if hasattr(item, name)
    }
    if set(limits) == {"ge", "le"}:
        return f" from {limits['ge']} to {limits['le']}"
    words = ", ".join(f"{_BOUNDS[name]} {limit}" for name, limit in limits.items())
    return f" of {words}" if words.startswith("at") else f" {words}" if words else ""
