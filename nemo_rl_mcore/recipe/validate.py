"""From a plain tree to a checked configuration, or to every problem it has."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import cast

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
    """Check fields, each alone; where all of them are right, check what goes together."""
    kind = kind_of(written)
    tree, problems = with_pretrained_model(written)
    for problem in tuple(problems):  # construction would read it once more
        cast("Tree", tree[problem.path.partition(".")[0]]).pop("model_name", None)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        found = chain.from_iterable(_translate(one, tree, kind) for one in error.errors(include_url=False))
        wrong = dict.fromkeys(found)  # a union says it once for each of its branches
        # A model that could not be read is missing for that reason alone.
        return Validated(
            None,
            problems
            + [one for one in wrong if not (problems and f"{one.path}.".startswith("policy.model."))],
            [],
        )
    if problems:
        return Validated(None, problems, [])
    found = list(run_problems(config))
    errors = [problem for problem in found if not problem.warns]
    return Validated(None if errors else config, errors, [problem for problem in found if problem.warns])


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
