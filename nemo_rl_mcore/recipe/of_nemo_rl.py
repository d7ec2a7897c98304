"""Recognise a NeMo RL recipe by keys that are valid in NeMo RL but in none of our recipes."""

from collections.abc import Collection, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem, Tree, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.recipe.schema import field_at, fields, is_known, section_of

LIST = Path(__file__).with_name("nemo_rl_keys.txt")
"""The keys of NeMo RL's recipes at one commit, one per line; written by tests/known_keys.py."""
_NAMED = 3
"""Number of keys that the message names; a recipe with no more foreign keys is probably ours."""


def recipe_of_nemo_rl(tree: Tree, file: Path | None, overridden: Collection[str]) -> Problem | None:
    """Return a single problem for a NeMo RL recipe; None for any other recipe.

    file: the recipe's file, if any. overridden: keys set on the command line.
    """
    keys = list(dict.fromkeys(foreign_keys(tree)))
    if not keys:
        return None
    typed = file is None or all(key in overridden for key in keys)
    named = "FILE" if typed else file
    migrate = f"run `nemo-rl-mcore migrate {named}`, or pass --migrate to check or {kind_of(tree).algorithm}"
    if len(keys) > _NAMED and not typed:
        named = ", ".join(keys[:_NAMED])
        what = f"is a recipe of NeMo RL: {len(keys)} of its keys are not ours ({named}, ...)"
        return Problem("foreign-recipe", str(file), what, migrate, tuple(keys))
    others = f" (so do {', '.join(keys[1:])})" if keys[1:] else ""
    what = f"exists only in NeMo RL{others}"
    remove = "remove them" if others else "remove it"
    remedy = f"{remove} or, for a NeMo RL recipe, {migrate}"
    return Problem("foreign-recipe", keys[0], what, remedy, tuple(keys))


def names_foreign(path: str) -> bool:
    """Return True if an override's path leads to a key of NeMo RL that none of our recipes has."""
    section: object = True
    for key in reversed(path.split(".")):
        section = {key: section}
    return any(True for _ in foreign_keys(cast("Tree", section)))


def foreign_keys(section: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the keys with values that NeMo RL has and none of our recipes has."""
    for key, value in section.items():
        path = join_path(prefix, str(key))
        kind = next((kind for kind in RUN_CONFIGS.values() if is_known(path, kind)), None)
        if kind is None:
            yield from leaf_paths({key: value}, prefix) if is_foreign(path) else ()
        elif (field := field_at(path, kind)) is None or section_of(field) is not None:
            for place, inner in inner_sections(value):
                yield from foreign_keys(inner, join_path(path, place))


def leaf_paths(section: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values in a section and its subsections."""
    for key, value in section.items():
        path = join_path(prefix, str(key))
        if isinstance(value, dict) and value:
            yield from leaf_paths(cast("Tree", value), path)
        else:
            yield path


def inner_sections(value: object) -> Iterator[tuple[str, Tree]]:
    """Yield a section with an empty name, or a list's sections with their indices."""
    many = enumerate(cast("list[object]", value)) if isinstance(value, list) else [("", value)]
    for place, one in many:
        if isinstance(one, dict):
            yield str(place), cast("Tree", one)


def is_foreign(path: str) -> bool:
    """Return True if a key that none of our recipes has is in NeMo RL's list, or is above or below a key in the list.

    In NeMo RL the sections of critic and teacher repeat a whole policy.
    """
    path = ".".join(part for part in path.split(".") if not part.isdecimal())
    twin = twin_in_policy(path)
    if path in _above_listed() or (path != twin and (twin in fields() or twin in _above_listed())):
        return True
    around = (one for known in (path, twin) for one in accumulate(known.split("."), join_path))
    return any(one in listed_keys() and one not in fields() for one in around)


def twin_in_policy(path: str) -> str:
    """Return the policy key that a critic's or a teacher's key repeats; any other path unchanged."""
    name, _, key = path.partition(".")
    return f"policy.{key}" if name in ("value", "teacher") else path


@cache
def listed_keys() -> frozenset[str]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition(":")[0] for line in lines if not line.startswith("#"))


@cache
def _above_listed() -> set[str]:
    return {section for key in listed_keys() for section in accumulate(key.split("."), join_path)}


def listed_origin() -> str:
    """Return the list's commit and date."""
    return LIST.read_text(encoding="utf-8").partition(" at ")[2].partition(",")[0]
