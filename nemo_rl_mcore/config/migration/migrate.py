"""The steps from a recipe of NeMo RL to one of ours."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import ConfigError, Problem, join_path
from nemo_rl_mcore.config.environment_values import References, with_references
from nemo_rl_mcore.config.foreign.judgement import Tree, value_at
from nemo_rl_mcore.config.foreign.known_keys import listed_origin
from nemo_rl_mcore.config.load import resolve
from nemo_rl_mcore.config.master import RUN_CONFIGS, RunConfig, kind_of
from nemo_rl_mcore.config.migration.backend import use_megatron
from nemo_rl_mcore.config.migration.draft import Draft, Kind, Note
from nemo_rl_mcore.config.migration.meaning import STEPS
from nemo_rl_mcore.config.schema import field_at, section_of
from nemo_rl_mcore.config.sources import locate, read_recipe
from nemo_rl_mcore.config.validate import to_own_keys, validate, with_pretrained_model


@dataclass(frozen=True)
class Migrated:
    """Our recipe, theirs as it was written (with its interpolations) and as it was computed, and what was said."""

    draft: Draft
    written: Tree
    computed: Tree
    references: References

    @property
    def kind(self) -> type[RunConfig]:
        """The class of the recipe."""
        return RUN_CONFIGS[self.draft.algorithm]

    @property
    def settled(self) -> bool:
        """Whether the recipe says all that theirs said."""
        return not any(note.kind in (Kind.REFUSED, Kind.OPEN) for note in self.draft.notes)


def migrate(path: str | Path) -> Migrated:
    """Read a recipe of NeMo RL, with what its `defaults:` name, and make one of ours of it.

    Raises ConfigError for a file that cannot be read, or is no such recipe.
    """
    recipe = read_recipe(path)
    computed, unresolved, references = resolve(recipe.tree)
    computed = {key: value for key, value in computed.items() if value is not None}
    _require_a_recipe(path, computed)
    draft = Draft(kind_of(computed).algorithm, copy.deepcopy(computed))
    use_megatron(draft)
    for step in STEPS:
        step(draft)
    _sort_out(draft)
    _leave_out_unknown(draft, draft.tree, "")
    for problem in [*validate(draft.tree).problems, *locate(unresolved, recipe.files, ())]:
        draft.notes.append(
            Note(Kind.OPEN, problem.path, "; ".join(filter(None, (problem.what, problem.remedy))))
        )
    draft.tree, _ = with_references(draft.tree, references)
    written = cast("Tree", OmegaConf.to_container(recipe.tree, resolve=False))
    return Migrated(draft, written, computed, references)


def _require_a_recipe(path: str | Path, tree: Tree) -> None:
    algorithms = [name for name in RUN_CONFIGS if isinstance(tree.get(name), dict)]
    known = ", ".join(RUN_CONFIGS)
    if len(algorithms) != 1:
        what = (
            f"has the sections {' and '.join(algorithms)}"
            if algorithms
            else f"has none of the sections {known}"
        )
        remedy = "name a recipe of one algorithm" + ("" if algorithms else " that this package has")
        raise ConfigError([Problem(str(path), what, remedy)])
    policy = tree.get("policy")
    if not isinstance(policy, dict) or not {"megatron_cfg", "dtensor_cfg"} & cast("Tree", policy).keys():
        what = "is no whole recipe of NeMo RL: it has no policy.megatron_cfg and no policy.dtensor_cfg"
        remedy = "name one, or write in `defaults:` the path of the exemplar that it changes"
        raise ConfigError([Problem(str(path), what, remedy)])


def _sort_out(draft: Draft) -> None:
    """Rename and drop by the table what stands under NeMo RL's names."""
    before = copy.deepcopy(draft.tree)
    filled, _ = with_pretrained_model(draft.tree)
    translation, screened = to_own_keys(draft.tree, filled, draft.algorithm)
    draft.tree = copy.deepcopy(translation.tree)
    _without_what_the_weights_say(draft, before, {*translation.origins})
    draft.dropped += [*screened.dropped, *translation.dropped]
    for theirs, ours in _by_section(translation.origins):
        draft.notes.append(Note(Kind.RENAMED, theirs, ours))
    for warning in screened.warnings:
        draft.notes.append(Note(Kind.WARNED, warning.path, f"{warning.what}; {warning.remedy}"))
    for problem in [*screened.problems, *translation.problems]:
        draft.pop(problem.path)
        draft.refuse(problem.path, value_at(before, problem.path), problem.remedy)


def _by_section(origins: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Their keys and ours; sections whose keys all kept their names once."""
    said = set[str]()
    for ours, theirs in origins.items():
        (new, key), (old, same) = (path.rsplit(".", 1) for path in (ours, theirs))
        whole = key == same and theirs.count(".") > 2 and not theirs.startswith("policy.")
        if whole and old not in said:
            yield old, new
        elif not whole:
            yield theirs, ours
        said.add(old)


def _without_what_the_weights_say(draft: Draft, before: Tree, moved: set[str]) -> None:
    for name in ("policy", "teacher"):
        section, written = draft.section(name), value_at(before, name)
        if not section or not isinstance(written, dict):
            continue
        if "tokenizer" not in written:
            section.pop("tokenizer", None)
        given = cast("Tree", value_at(before, f"{name}.model") or {})
        model = section.pop("model", None)
        kept = {
            key: value
            for key, value in (cast("Tree", model) if isinstance(model, dict) else given).items()
            if key in given or f"{name}.model.{key}" in moved
        }
        if kept:
            section["model"] = kept


def _leave_out_unknown(draft: Draft, section: Tree, prefix: str) -> None:
    """Take out the keys that neither this package nor its table has."""
    kind = RUN_CONFIGS[draft.algorithm]
    for key, value in [*section.items()]:
        path = join_path(prefix, str(key))
        field = field_at(path, kind)
        if field is None:
            section.pop(key)
            draft.refuse(path, value, f"no key of this package, nor of NeMo RL at {listed_origin()}")
        elif section_of(field) is not None:
            for place, inner in _sections(value):
                _leave_out_unknown(draft, inner, join_path(path, place))


def _sections(value: object) -> Iterator[tuple[str, Tree]]:
    many = enumerate(cast("list[object]", value)) if isinstance(value, list) else [("", value)]
    for place, one in many:
        if isinstance(one, dict):
            yield str(place), cast("Tree", one)
