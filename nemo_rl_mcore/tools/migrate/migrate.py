"""From a recipe of NeMo RL to one of ours, and to what is said of each key."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.config.run_config import RunConfig, with_references
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.recipe.environment_values import without_values
from nemo_rl_mcore.recipe.load import Computed, check, compute
from nemo_rl_mcore.recipe.of_nemo_rl import foreign_keys, inner_sections, leaf_paths, listed_origin
from nemo_rl_mcore.recipe.schema import field_at, section_of
from nemo_rl_mcore.recipe.sources import key_lines, read_recipe
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate import meaning, training
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.judgements import rename, screen, screen_second_models

_OF_OTHER_COMMANDS = {
    "eval": "write the section `eval` of this package into a recipe of the model, for the command of that name",
    "rm": "train the reward model elsewhere: there is no such algorithm here",
}
"""What leads on from recipes of NeMo RL that train no policy."""


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
        """Whether the recipe says all that theirs said."""
        return not any(note.kind in (Kind.REFUSED, Kind.OPEN) for note in self.draft.notes)


def migrate(
    path: str | Path, overrides: Iterable[str] = (), models: Mapping[str, str] | None = None
) -> Migrated:
    """Read a recipe of NeMo RL, with what its `defaults:` name, and make one of ours of it.

    models: the model of each section that has one, such as "policy" or "teacher", in place of the recipe's.
    Raises ConfigError for a file that cannot be read, is no such recipe, or has no such section.
    """
    read = compute(read_recipe(path), overrides)
    algorithms = [name for name in RUN_CONFIGS if isinstance(read.tree.get(name), dict)]
    policy, what, remedy = read.tree.get("policy"), "", "name a recipe of one algorithm"
    if len(algorithms) > 1:
        what = f"has the sections {' and '.join(algorithms)}"
    elif not algorithms:
        what = f"has none of the sections {', '.join(RUN_CONFIGS)}"
        others = [said for key, said in _OF_OTHER_COMMANDS.items() if key in read.tree]
        remedy = [*others, f"{remedy} that this package has"][0]
    elif not isinstance(policy, dict) or not {"megatron_cfg", "dtensor_cfg"} & cast("Tree", policy).keys():
        what = "is no whole recipe of NeMo RL: it has no policy.megatron_cfg and no policy.dtensor_cfg"
        remedy = "name one, or write in `defaults:` the path of the exemplar that it changes"
    if what:
        raise ConfigError([Problem("wrong-kind", str(path), what, remedy)])
    draft = Draft(kind_of(read.tree).algorithm, copy.deepcopy(read.tree))
    _name_models(draft, models or {})
    training.use_megatron(draft)
    for step in (*meaning.STEPS, *training.STEPS):
        step(draft)
    meaning.find_text_files(draft, reversed(read.recipe.files))
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
    problems = tuple(
        replace(
            one, remedy=f"the recipe leaves it to you: `migrate --model {one.path.partition('.')[0]}=NAME`"
        )
        if one.code == "not-found" and one.path.endswith("model_name")
        else one
        for one in problems
    )
    leave_open(draft, problems)
    as_written = [
        replace(problem, path=draft.origins.get(problem.path, problem.path))
        for problem in (*draft.problems, *problems)
    ]
    draft.tree = with_references(draft.tree, read.references)
    return Migrated(draft, read, config, warnings, read.located(as_written))


def _name_models(draft: Draft, models: Mapping[str, str]) -> None:
    """Put a model in the place of a section's own, wherever the recipe repeats its name, as for the tokenizer."""
    having = [name for name, one in draft.tree.items() if isinstance(one, dict) and "model_name" in one]
    for section, model in models.items():
        if section not in having:
            what, remedy = f"the recipe has no {section}.model_name", f"name one of {', '.join(having)}"
            raise ConfigError([Problem("not-found", "--model", what, remedy)])
        draft.tree = _with_name(draft.tree, draft.get(f"{section}.model_name"), model)


def _with_name[Value](tree: Value, name: object, model: str) -> Value:
    """Return a recipe, or a part of one, in which this name stands wherever the other stood."""
    if isinstance(tree, dict):
        return cast(
            "Value", {key: _with_name(value, name, model) for key, value in cast("Tree", tree).items()}
        )
    if isinstance(tree, list):
        return cast("Value", [_with_name(value, name, model) for value in cast("list[object]", tree)])
    return cast("Value", model) if tree == name else tree


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


EXIT_OPEN = 2
"""Exit status where the recipe is written and does not say all that theirs said."""
EXIT_NO_FILE = 1
"""Exit status where no recipe is written."""


def run_migrate(
    recipe: str,
    output: str | None,
    overrides: Sequence[str],
    models: Mapping[str, str],
    examine: Callable[[RunConfig], Iterable[Problem]],
) -> int:
    """Write our recipe, copies of the prompts that it names, and the report.

    A copy has the recipe's name before its own where a file of that name says something else. Raises ConfigError for
    what is no recipe, or would be overwritten. examine: what `check` says of a recipe beyond its keys; it is left open.
    """
    target = Path(output or f"{Path(recipe).stem}_mcore.yaml")
    _require_free(target)
    migrated = migrate(recipe, overrides, models)
    draft = migrated.draft
    if migrated.config is not None:
        leave_open(draft, examine(migrated.config))
    try:
        for path, found in draft.files.items():
            if not draft.has(path):
                continue
            content, copied = found.read_bytes(), target.with_name(found.name)
            if copied.exists() and copied.read_bytes() != content:
                copied = target.with_name(f"{target.stem}_{found.name}")
                if copied.exists() and copied.read_bytes() != content:
                    _require_free(copied)
            if not copied.exists():
                copied.write_bytes(content)
            place, _, key = path.rpartition(".")
            draft.section(place)[key] = copied.name
            draft.note(Kind.FILES, path, f"{copied.name}, a copy of {found}")
        with target.open("x", encoding="utf-8") as file:
            file.write(recipe_text(migrated, Path(recipe).name, overrides))
    except OSError as error:
        what = f"{error.filename or target} cannot be written: {error.strerror}"
        raise ConfigError([Problem("not-writable", "--output", what)]) from error
    for line in report(migrated, target):
        write_line(sys.stdout, without_values(line, migrated.read.references))
    return 0 if migrated.settled else EXIT_OPEN


def _require_free(target: Path) -> None:
    if target.exists():
        what = f"{target} is there already, and is not overwritten"
        raise ConfigError([Problem("already-there", "--output", what, "name another file")])


def run_in_memory(recipe: str, overrides: Iterable[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Migrate a recipe to run it, and write what is not as it was; give its configuration and warnings.

    Raises ConfigError for a key that does not carry over, or a recipe that has problems.
    """
    migrated = load_migrated(recipe, overrides)
    assert migrated.config is not None
    for line in report(migrated):
        write_line(sys.stdout, without_values(line, migrated.read.references))
    return migrated.config, migrated.warnings


_IN_SHORT = (Kind.RENAMED, Kind.FILES)
"""Groups whose keys mean in a run what they meant; files are found, or `check` says so."""


def report(migrated: Migrated, target: Path | None = None) -> Iterator[str]:
    """Yield what became of the keys: a line for each group, and one for each key that is not as it was.

    target: the file that was written; without one, keys that mean what they meant are counted alone.
    """
    draft = migrated.draft
    said = {note.path for note in draft.notes}
    kept = [path for path in leaf_paths(draft.tree) if path not in said]
    yield f"{target or 'migrated from NeMo RL'}: a recipe of {draft.algorithm}"
    yield f"kept as they are: {len(kept)} keys"
    for kind in Kind:
        notes = [note for note in draft.notes if note.kind is kind]
        if notes:
            yield f"{kind.value}: {len(notes)}"
            yield from (f"  {note}" for note in notes if target or kind not in _IN_SHORT)
    yield f"left out at values that change nothing here: {len(draft.dropped)}"
    if target:
        yield f"next: `{command('check', '--config', str(target))}`"


_BEHIND_KEYS = (Kind.CHANGED, Kind.OPEN)


def recipe_text(migrated: Migrated, source: str, overrides: Iterable[str] = ()) -> str:
    """Return our recipe as YAML; `source` names the recipe that it was made of, with these overrides.

    What was changed, and what is left to settle, stands behind its key; what has no key in the file, at the head.
    """
    draft = migrated.draft
    text = _yaml(draft.tree, default_flow_style=False)
    lines, places = text.splitlines(keepends=True), dict[str, int]()
    for path, line, value in key_lines(yaml.SafeLoader(text).get_single_node(), ""):
        # A comment may stand behind the whole of a value in one line; else behind the name of its section.
        whole = cast("Any", value)
        in_one = isinstance(value, yaml.ScalarNode) or whole.flow_style
        places[path] = whole.end_mark.line if in_one else line - 1
    head = [f"Made by `nemo-rl-mcore migrate` of NeMo RL's {' '.join([source, *overrides])}."]
    behind: dict[int, list[str]] = {}
    for note in draft.notes:
        if note.kind in _BEHIND_KEYS and note.path in places:
            behind.setdefault(places[note.path], []).append(note.what)
        elif note.kind is Kind.OPEN:
            head.append(f"Left for you to settle, {note}")
    for path, (value, remedy) in draft.refused.items():
        head.append(f"Refused, {_yaml({path: value}, default_flow_style=True).strip()[1:-1]}; {remedy}")
    for place, whats in behind.items():
        lines[place] = f"{lines[place].rstrip()}  {_comment(migrated, '; '.join(whats))}"
    return "".join([*(_comment(migrated, one) for one in head), *lines])


def _comment(migrated: Migrated, text: str) -> str:
    return f"# {' '.join(without_values(text, migrated.read.references).split())}\n"


def _yaml(value: object, *, default_flow_style: bool) -> str:
    return yaml.safe_dump(
        value, default_flow_style=default_flow_style, width=float("inf"), sort_keys=False, allow_unicode=True
    )
