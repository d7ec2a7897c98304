"""From a plain tree to a checked configuration, or to every problem it has."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_mcore.config.base import Problem, Tree, join_path
from nemo_rl_mcore.config.master import kind_of
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models.pretrained import fill_from_model_name
from nemo_rl_mcore.recipe.rules.runs import run_problems
from nemo_rl_mcore.recipe.schema import (
    Kind,
    allowed,
    field_at,
    field_help,
    field_path,
    fields,
    holds_names,
    nearest_path,
    placeholder,
    section_of,
    suggestion,
)


@dataclass(frozen=True)
class Validated:
    """The configuration, None where there are problems; warnings are of keys that nothing reads."""

    config: RunConfig | None
    problems: list[Problem]
    warnings: list[Problem]


def validate(written: Tree) -> Validated:
    """Check fields first, then what goes together; a wrong field does not hide the problems of the others."""
    kind = kind_of(written)
    tree, unread = with_pretrained_model(written)
    problems = [*unread]
    for problem in unread:  # already reported; construction would read it once more
        cast("Tree", tree[problem.path.partition(".")[0]]).pop("model_name", None)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
        translated = chain.from_iterable(_translate(details, tree, kind) for details in found)
        field_problems = list(dict.fromkeys(translated))  # a union says it once for each of its branches
        # A model that could not be read is missing for that reason alone.
        problems += [problem for problem in field_problems if not (unread and _covers(_MODEL, problem.path))]
        config = _stand_in(tree, kind)
    else:
        field_problems = []
    if config is not None:
        wrong = {problem.path for problem in [*field_problems, *unread]} | _meant(field_problems, kind)
        problems += [problem for problem in run_problems(config) if not _rests_on(problem, wrong)]
    errors = [problem for problem in problems if not problem.warns]
    return Validated(None if errors else config, errors, [problem for problem in problems if problem.warns])


_MODEL = "policy.model"

Key = int | str
"""A key of a section, or a place in a list."""


def with_pretrained_model(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return the recipe completed by what model_name says, of the policy and of a teacher."""
    filled, problems = dict(tree), list[Problem]()
    for name in ("policy", "teacher"):
        section = tree.get(name)
        if isinstance(section, dict):
            filled[name], unread = fill_from_model_name(cast("Tree", section), tokenizer=name == "policy")
            problems += [problem.below(name) for problem in unread]
    return filled, problems


def _translate(details: ErrorDetails, tree: Tree, kind: Kind) -> Iterator[Problem]:
    path = ".".join(map(str, _as_written(details["loc"], tree)))
    given = _shown(details["input"])
    match details["type"]:
        case "extra_forbidden":
            yield Problem("unknown-key", path, "unknown key", suggestion(path, kind))
        case "missing":
            yield from _missing(path, kind)
        case "value_error":
            yield Problem("not-allowed", path, str(details.get("ctx", {}).get("error", details["msg"])))
        case _:
            field = field_at(path, kind)
            options = allowed(field) if field else details["msg"]
            yield Problem("not-allowed", path, f"{given} is not allowed", f"allowed: {options}")


def _missing(path: str, kind: Kind) -> Iterator[Problem]:
    """Yield that a mandatory key is missing and, of a section, its own mandatory keys with it."""
    field = fields(kind)[field_path(path, kind)]
    yield Problem("missing", path, "missing", f"set it: {field_help(path, kind)} ({allowed(field)})")
    section = section_of(field)
    if section is not None and not holds_names(field):
        for name, inner in section.model_fields.items():
            if inner.is_required():
                yield from _missing(join_path(path, name), kind)


def _as_written(loc: tuple[int | str, ...], tree: Tree) -> list[Key]:
    """Return the keys and places that lead through a recipe to an error, without the names of a union's branches.

    A place is told where it is that of a section; of any other list the list's field speaks for all of it.
    """
    keys, node = list[Key](), cast("object", tree)
    for depth, part in enumerate(loc):
        last = depth == len(loc) - 1
        if isinstance(part, int):
            inner = cast("list[object]", node)[part] if isinstance(node, list) else None
            if isinstance(inner, dict) and not last:
                keys.append(part)
                node = cast("object", inner)
        elif isinstance(node, dict) and (last or part in node):
            keys, node = [*keys, part], cast("Tree", node).get(part)
    return keys


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(problems: list[Problem], kind: Kind) -> set[str]:
    """Return the keys that misspelt ones were meant to set; what rests on them is not judged either."""
    typos = (problem.path for problem in problems if problem.what == "unknown key")
    return {nearest for path in typos if (nearest := nearest_path(path, kind)) is not None}


def _rests_on(problem: Problem, wrong: set[str]) -> bool:
    keys = (problem.path, *problem.related)
    return any(_covers(key, path) or _covers(path, key) for key in keys for path in wrong)


def _covers(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


_PASSES = 8
"""Sections are nested less deeply than this; each pass may uncover what a new section lacks."""


def _stand_in(tree: Tree, kind: Kind) -> RunConfig | None:
    """Return the configuration with stand-ins for the wrong fields, so that the rules between the others can run."""
    tree = copy.deepcopy(tree)
    for _ in range(_PASSES):
        try:
            return kind.model_validate(tree)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                _replace(tree, _as_written(details["loc"], tree), kind)
    return None


def _replace(tree: Tree, keys: list[Key], kind: Kind) -> None:
    """Remove a wrong field, or give a required one the simplest value of its type."""
    node: object = tree
    for key in keys[:-1]:
        node = cast("Any", node)[key]
    if not isinstance(node, dict):
        return
    section, last = cast("Tree", node), str(keys[-1])
    field = field_at(".".join(map(str, keys)), kind)
    if field is not None and field.is_required():
        section[last] = placeholder(field)
    else:
        section.pop(last, None)
