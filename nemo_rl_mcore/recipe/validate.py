"""Validate a plain tree, and return the configuration or all problems."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, cast, get_origin

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
    field_path,
    fields,
    holds_names,
    section_of,
    suggestion,
)


@dataclass(frozen=True)
class Validated:
    """A configuration, or None if there are problems; warnings concern keys that nothing reads."""

    config: RunConfig | None
    problems: list[Problem]
    warnings: list[Problem]


def validate(written: Tree) -> Validated:
    """Check each field on its own and, if all are valid, the rules between them."""
    kind = kind_of(written)
    tree, problems = with_pretrained_model(written)
    for problem in tuple(problems):  # construction would read it again
        cast("Tree", tree[problem.path.partition(".")[0]]).pop("model_name", None)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        found = chain.from_iterable(_translate(one, tree, kind) for one in error.errors(include_url=False))
        wrong = dict.fromkeys(found)  # a union reports it once per branch
        # A model that could not be read must not also be reported as missing.
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
"""A section's key, or a list index."""


def with_pretrained_model(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return the recipe with the policy and the teacher filled from their model_name."""
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
    """Yield a problem for a missing mandatory key and, if it is a section, for its own mandatory keys."""
    field = fields(kind)[field_path(path, kind)]
    options = f"{'one of ' * (get_origin(field.annotation) is Literal)}{allowed(field)}"
    help_text = " ".join((field.description or "").partition("\n\n")[0].split())
    if not help_text.endswith("..."):
        help_text = help_text.removesuffix(".")
    yield Problem("missing", path, "is missing", f"set it to {options}: {help_text}")
    section = section_of(field)
    if section is not None and not holds_names(field):
        for name, inner in section.model_fields.items():
            if inner.is_required():
                yield from _missing(join_path(path, name), kind)


def _as_written(loc: tuple[int | str, ...], tree: Tree) -> list[Key]:
    """Return the keys and list indices that lead to an error, without the names of a union's branches.

    An index is kept only in a list of sections; for other lists the error is reported for the whole list.
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
