"""Leave out of our recipe what it says without being written: keys at this package's defaults."""

import copy
import re
from collections.abc import Collection, Iterator
from typing import cast

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_rl_mcore.config.base import StrictModel, Tree, join_path, value_at
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.foreign.recognised import leaf_paths
from nemo_rl_mcore.recipe.schema import Kind, field_at, holds_names, section_of
from nemo_rl_mcore.recipe.validate import validate
from nemo_rl_mcore.tools.migrate.draft import Draft

REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def without_defaults(draft: Draft, written: Tree) -> tuple[Tree, int]:
    """Return the tree without keys whose value is our default, and how many they are.

    A key stays where something is said of it, where an interpolation of theirs, `written`, refers to it, and where the
    recipe means something else without it, as where another key stands in for it.
    """
    kept, kind = {*draft.comments, *_referenced(written)}, RUN_CONFIGS[draft.algorithm]
    short, whole = _without_those(draft.tree, "", kind, kept), _meaning(draft.tree)
    if _meaning(short) != whole:
        for path in sorted({*leaf_paths(draft.tree)} - {*leaf_paths(short)}):
            with_it = _without_those(draft.tree, "", kind, kept | {path})
            if _meaning(with_it) != _meaning(short):
                kept.add(path)
                short = with_it
    return short, len([*leaf_paths(draft.tree)]) - len([*leaf_paths(short)])


_ENGINE = "policy.generation.vllm_cfg"
_OF_THE_ENGINE = {
    f"{_ENGINE}.precision": "policy.precision",
    f"{_ENGINE}.max_model_len": "policy.max_total_sequence_length",
}
"""Keys of vLLM that are those of the policy where they are left out."""
_COPIES = (
    *_OF_THE_ENGINE,
    *(f"policy.megatron_cfg.{key}" for key in ("pipeline_dtype", "optimizer.bf16", "optimizer.clip_grad")),
    *(f"data.{source}.processor" for source in ("default", "train", "validation")),
    *(f"data.{source}.split_validation_size" for source in ("train", "validation")),
)
"""Keys that say again what other ones say, or what a known data set has."""


def leave_out_copies(draft: Draft) -> None:
    """Drop the keys that say again what others say, where the run is the same without them."""
    run = _run(draft.tree)
    for path in _COPIES if run is not None else ():
        value, same = draft.get(path), _OF_THE_ENGINE.get(path)
        if value is None or path in draft.comments or (same and value != draft.get(same)):
            continue
        shorter = _without(draft.tree, path)
        if _run(shorter) == run:
            draft.tree = shorter
            draft.dropped.append(path)


def _run(tree: Tree) -> dict[str, object] | None:
    """Return what is run, but for the keys that are copies; None where a recipe has problems."""
    validated = validate(copy.deepcopy(tree))
    if validated.config is None:
        return None
    plain = validated.config.plain()
    return {
        path: value_at(plain, path)
        for path in leaf_paths(plain)
        if path not in _COPIES or path.endswith("split_validation_size")
    }


def _without(tree: Tree, path: str) -> Tree:
    """Return a copy without a key, and without sections that are empty then."""
    key, _, inner = path.partition(".")
    if not inner:
        return {name: value for name, value in tree.items() if name != key}
    below = _without(cast("Tree", tree[key]), inner)
    return {name: below if name == key else value for name, value in tree.items() if name != key or below}


def _meaning(tree: Tree) -> tuple[object, object]:
    validated = validate(copy.deepcopy(tree))
    return validated.config, validated.problems


def _without_those(section: Tree, prefix: str, kind: Kind, kept: Collection[str]) -> Tree:
    """Take the keys out that have their defaults, and sections that are then empty and are made without being named."""
    short = Tree()
    for key, value in section.items():
        path = join_path(prefix, str(key))
        field = field_at(path, kind)
        inner = value
        if isinstance(value, dict) and field is not None and section_of(field) is not None:
            inner = _without_those(cast("Tree", value), path, kind, kept)
        named = prefix and field_at(prefix, kind)
        if path in kept or field is None or (named and holds_names(named)) or not _is_default(inner, field):
            short[key] = inner
    return short


def _is_default(value: object, field: FieldInfo) -> bool:
    default = field.default
    if value == {}:
        return field.default_factory is not None or isinstance(default, StrictModel)
    return default is not PydanticUndefined and type(value) is type(default) and value == default


def _referenced(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield from REFERENCE.findall(node)
    elif isinstance(node, dict | list):
        for one in cast("Tree", node).values() if isinstance(node, dict) else cast("list[object]", node):
            yield from _referenced(one)
