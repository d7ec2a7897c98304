"""The steps from a recipe of NeMo RL to one of ours."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path, value_at
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.config.references import with_references
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.foreign.known_keys import listed_origin
from nemo_rl_mcore.recipe.foreign.recognised import foreign_keys, inner_sections
from nemo_rl_mcore.recipe.foreign.second_models import screen_second_models
from nemo_rl_mcore.recipe.foreign.translated import translate
from nemo_rl_mcore.recipe.foreign.unsupported import screen
from nemo_rl_mcore.recipe.load import Computed, check, compute
from nemo_rl_mcore.recipe.schema import field_at, section_of
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate import described, failures, idle, meaning, nemo_gym
from nemo_rl_mcore.tools.migrate.backend import clip_as_read, use_megatron
from nemo_rl_mcore.tools.migrate.brevity import leave_out_copies
from nemo_rl_mcore.tools.migrate.defaults import write_defaults
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note
from nemo_rl_mcore.tools.migrate.machines import share_out_cluster
from nemo_rl_mcore.tools.migrate.memory import compare_no_rounded_weights, offload_beside_engines
from nemo_rl_mcore.tools.migrate.schedule import decay_as_scheduled, stretch_schedule
from nemo_rl_mcore.tools.migrate.text_files import find_text_files


@dataclass(frozen=True)
class Migrated:
    """Our recipe, theirs as it was written (with its interpolations) and as it was computed, and what was said.

    config: the recipe as it is run; None where something is wrong with it. problems: what is, and what was refused.
    """

    draft: Draft
    written: Tree
    read: Computed
    config: RunConfig | None
    warnings: tuple[Problem, ...]
    problems: list[Problem]

    @property
    def kind(self) -> type[RunConfig]:
        """Return the class of the recipe."""
        return RUN_CONFIGS[self.draft.algorithm]

    @property
    def settled(self) -> bool:
        """Return whether the recipe says all that theirs said."""
        return not any(note.kind in (Kind.REFUSED, Kind.OPEN) for note in self.draft.notes)


_STEPS = (
    clip_as_read,
    *(write_defaults, share_out_cluster, stretch_schedule, decay_as_scheduled),
    *nemo_gym.STEPS,
    *meaning.STEPS,
    *idle.STEPS,
    *failures.STEPS,
    *described.STEPS,
    compare_no_rounded_weights,
    offload_beside_engines,
)


def migrate(path: str | Path, overrides: Iterable[str] = ()) -> Migrated:
    """Read a recipe of NeMo RL, with what its `defaults:` name, and make one of ours of it.

    Raises ConfigError for a file that cannot be read, or is no such recipe.
    """
    read = compute(read_recipe(path), overrides)
    _require_a_recipe(path, read.tree)
    draft = Draft(kind_of(read.tree).algorithm, copy.deepcopy(read.tree))
    use_megatron(draft)
    for step in _STEPS:
        step(draft)
    find_text_files(draft, reversed(read.recipe.files))
    _sort_out(draft)
    _leave_out_unknown(draft, draft.tree, "")
    leave_out_copies(draft)
    config, warnings, problems = _checked(read, draft.tree)
    leave_open(draft, problems)
    as_written = [
        replace(problem, path=draft.origins.get(problem.path, problem.path))
        for problem in (*draft.problems, *problems)
    ]
    draft.tree = with_references(draft.tree, read.references)
    written = cast("Tree", OmegaConf.to_container(read.recipe.tree, resolve=False))
    return Migrated(draft, written, read, config, warnings, read.located(as_written))


def leave_open(draft: Draft, problems: Iterable[Problem]) -> None:
    """Note what is left to settle, but for keys of which it is said already."""
    said = {note.path for note in draft.notes if note.kind is Kind.OPEN}
    for problem in problems:
        if problem.path not in said:
            what = "; ".join(filter(None, (problem.what, problem.remedy)))
            draft.notes.append(Note(Kind.OPEN, problem.path, what))


def _checked(read: Computed, tree: Tree) -> tuple[RunConfig | None, tuple[Problem, ...], tuple[Problem, ...]]:
    try:
        return *check(read, tree), ()
    except ConfigError as error:
        return None, (), error.problems


def load_migrated(path: str | Path, overrides: Iterable[str] = ()) -> Migrated:
    """Migrate a recipe of NeMo RL to run it; raises ConfigError for what it asks for and would not get."""
    migrated = migrate(path, overrides)
    if not any(foreign_keys(migrated.read.tree)):
        what = "is no recipe of NeMo RL: all of its keys are ours"
        raise ConfigError([Problem("wrong-kind", str(path), what, "leave out --migrate")])
    if migrated.problems:
        raise ConfigError(migrated.problems)
    return migrated


_OF_OTHER_COMMANDS = {
    "eval": "write the section `eval` of this package into a recipe of the model, for the command of that name",
    "rm": "train the reward model elsewhere: there is no such algorithm here",
}
"""What leads on from recipes of NeMo RL that train no policy."""


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
        remedy = next(
            (said for key, said in _OF_OTHER_COMMANDS.items() if key in tree and not algorithms), remedy
        )
        raise ConfigError([Problem("wrong-kind", str(path), what, remedy)])
    policy = tree.get("policy")
    if not isinstance(policy, dict) or not {"megatron_cfg", "dtensor_cfg"} & cast("Tree", policy).keys():
        what = "is no whole recipe of NeMo RL: it has no policy.megatron_cfg and no policy.dtensor_cfg"
        remedy = "name one, or write in `defaults:` the path of the exemplar that it changes"
        raise ConfigError([Problem("wrong-kind", str(path), what, remedy)])


def _sort_out(draft: Draft) -> None:
    """Rename and drop by the table what stands under NeMo RL's names."""
    before = copy.deepcopy(draft.tree)
    filled, _ = with_pretrained_model(draft.tree)
    screened = screen(filled)
    kept, origins = screen_second_models(screened.kept, filled, screened)
    translation = translate(kept, draft.algorithm, draft.tree)
    draft.origins = translation.origins | origins
    draft.tree = copy.deepcopy(translation.tree)
    _without_what_the_weights_say(draft, before, {*draft.origins})
    draft.dropped += [*screened.dropped, *translation.dropped]
    for theirs, ours in _by_section(draft.origins):
        draft.notes.append(Note(Kind.RENAMED, theirs, ours))
    for warning in screened.warnings:
        draft.notes.append(Note(Kind.WARNED, warning.path, f"{warning.what}; {warning.remedy}"))
    for problem in [*screened.problems, *translation.problems]:
        draft.pop(problem.path)
        draft.refuse(problem.path, value_at(before, problem.path), problem.remedy, problem.what, problem.code)


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
            nowhere = f"no key of this package, nor of NeMo RL at {listed_origin()}"
            draft.refuse(path, value, nowhere, "unknown key", "unknown-key")
        elif section_of(field) is not None:
            for place, inner in inner_sections(value):
                _leave_out_unknown(draft, inner, join_path(path, place))
