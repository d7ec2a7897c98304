"""From a recipe of NeMo RL to one of ours, and to what is said of each key."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.config.references import with_references
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.recipe.load import Computed, check, compute
from nemo_rl_mcore.recipe.of_nemo_rl import foreign_keys, inner_sections, listed_origin
from nemo_rl_mcore.recipe.schema import field_at, section_of
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate import meaning, rollouts, training
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.judgements import screen
from nemo_rl_mcore.tools.migrate.renamed import rename, screen_second_models


@dataclass(frozen=True)
class Migrated:
    """Our recipe, theirs as it was computed, and what was said.

    config: the recipe as it is run; None where something is wrong with it. problems: what is, and what was refused.
    """

    draft: Draft
    read: Computed
    config: RunConfig | None
    warnings: tuple[Problem, ...]
    problems: list[Problem]

    @property
    def settled(self) -> bool:
        """Return whether the recipe says all that theirs said."""
        return not any(note.kind in (Kind.REFUSED, Kind.OPEN) for note in self.draft.notes)


def migrate(path: str | Path, overrides: Iterable[str] = ()) -> Migrated:
    """Read a recipe of NeMo RL, with what its `defaults:` name, and make one of ours of it.

    Raises ConfigError for a file that cannot be read, or is no such recipe.
    """
    read = compute(read_recipe(path), overrides)
    _require_a_recipe(path, read.tree)
    draft = Draft(kind_of(read.tree).algorithm, copy.deepcopy(read.tree))
    training.use_megatron(draft)
    for step in (*meaning.STEPS, *rollouts.STEPS, *training.STEPS):
        step(draft)
    _find_text_files(draft, reversed(read.recipe.files))
    completed, _ = with_pretrained_model(copy.deepcopy(draft.tree))
    screen(draft, completed)
    screen_second_models(draft, completed)
    rename(draft, completed)
    _leave_out_unknown(draft, draft.tree, "")
    training.leave_out_repeats(draft)
    config, warnings, problems = None, tuple[Problem, ...](), tuple[Problem, ...]()
    try:
        config, warnings = check(read, draft.tree)
    except ConfigError as error:
        problems = error.problems
    leave_open(draft, problems)
    as_written = [
        replace(problem, path=draft.origins.get(problem.path, problem.path))
        for problem in (*draft.problems, *problems)
    ]
    draft.tree = with_references(draft.tree, read.references)
    return Migrated(draft, read, config, warnings, read.located(as_written))


def leave_open(draft: Draft, problems: Iterable[Problem]) -> None:
    """Note what is left to settle, but for keys of which it is said already."""
    said = {note.path for note in draft.notes if note.kind is Kind.OPEN}
    for problem in problems:
        if problem.path not in said:
            draft.note(Kind.OPEN, problem.path, "; ".join(filter(None, (problem.what, problem.remedy))))


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
    policy = tree.get("policy")
    if len(algorithms) > 1:
        what = f"has the sections {' and '.join(algorithms)}"
        remedy = "name a recipe of one algorithm"
    elif not algorithms:
        what = f"has none of the sections {', '.join(RUN_CONFIGS)}"
        others = [said for key, said in _OF_OTHER_COMMANDS.items() if key in tree]
        remedy = [*others, "name a recipe of one algorithm that this package has"][0]
    elif not isinstance(policy, dict) or not {"megatron_cfg", "dtensor_cfg"} & cast("Tree", policy).keys():
        what = "is no whole recipe of NeMo RL: it has no policy.megatron_cfg and no policy.dtensor_cfg"
        remedy = "name one, or write in `defaults:` the path of the exemplar that it changes"
    else:
        return
    raise ConfigError([Problem("wrong-kind", str(path), what, remedy)])


def _find_text_files(draft: Draft, recipes: Iterable[Path]) -> None:
    """Find the prompts that a recipe names: NeMo RL reads them where a command starts, mostly its repository's root.

    They are looked for there, and in the folders above the recipes, it and those of its `defaults:`.
    """
    folders = [Path(), *dict.fromkeys(folder for recipe in recipes for folder in recipe.absolute().parents)]
    for place, source in meaning.sources_of(draft):
        for key in TEXT_FILES:
            name, path = source.get(key), f"{place}.{key}"
            if not isinstance(name, str) or not name:
                continue
            found = next((folder / name for folder in folders if _is_file(folder / name)), None)
            if found is None:
                advice = "write the path of that file, or copy it to where a command starts"
                draft.note(Kind.OPEN, path, f"{name} is not there; {advice}")
            else:
                source[key] = str(found.absolute())
                draft.files[path] = found.absolute()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # such as a name that is too long, or has a NUL
        return False


def _leave_out_unknown(draft: Draft, section: Tree, prefix: str) -> None:
    """Take out the keys that neither this package nor its table has."""
    kind = RUN_CONFIGS[draft.algorithm]
    for key, value in [*section.items()]:
        path = join_path(prefix, str(key))
        field = field_at(path, kind)
        if field is None:
            section.pop(key)
            nowhere = f"no key of this package, nor of NeMo RL at {listed_origin()}"
            draft.refuse(path, value, nowhere, "unknown key")
        elif section_of(field) is not None:
            for place, inner in inner_sections(value):
                _leave_out_unknown(draft, inner, join_path(path, place))
