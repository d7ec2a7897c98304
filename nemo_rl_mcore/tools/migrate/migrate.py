"""Convert a NeMo RL recipe into one of ours, with a report on each key."""

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, join_path, refused
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.config.run_config import RunConfig, with_references
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.recipe.interpolations import without_values
from nemo_rl_mcore.recipe.load import Computed, check, compute
from nemo_rl_mcore.recipe.of_nemo_rl import foreign_keys, inner_sections, leaf_paths, listed_origin
from nemo_rl_mcore.recipe.schema import field_at, section_of
from nemo_rl_mcore.recipe.sources import key_lines, read_recipe
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate import meaning, training
from nemo_rl_mcore.tools.migrate.draft import KEYS, Draft, Kind, shown
from nemo_rl_mcore.tools.migrate.judgements import rename, screen, screen_second_models


@dataclass(frozen=True)
class Migrated:
    """A migrated recipe.

    read: NeMo RL's recipe with `defaults:` and overrides applied. config: None if there are problems. problems:
    findings of `check`, and refused keys.
    """

    draft: Draft
    read: Computed
    config: RunConfig | None
    warnings: tuple[Problem, ...]
    problems: list[Problem]

    @property
    def settled(self) -> bool:
        return not any(note.kind in (Kind.REFUSED, Kind.OPEN) for note in self.draft.notes)


def migrate(
    path: str | Path, overrides: Iterable[str] = (), models: Mapping[str, str] | None = None
) -> Migrated:
    """Read a NeMo RL recipe with its `defaults:`, and translate it.

    models: replace the model_name of these sections, such as "policy" or "teacher". Raises ConfigError for a file that
    cannot be read or is not such a recipe, or if it lacks such a section.
    """
    read = compute(read_recipe(path), overrides)
    _require_recipe(path, read.tree)
    draft = Draft(kind_of(read.tree).algorithm, copy.deepcopy(read.tree))
    _require_text(draft)
    having = [name for name, one in draft.tree.items() if isinstance(one, dict) and "model_name" in one]
    for section, model in (models or {}).items():
        if section not in having:
            what, remedy = f"the recipe has no {section}.model_name", f"name one of {', '.join(having)}"
            raise refused("not-found", "--model", what, remedy)
        draft.tree = _with_name(draft.tree, draft.get(f"{section}.model_name"), model)
    training.use_megatron(draft)
    for step in (*meaning.STEPS, *training.STEPS):
        step(draft)
    meaning.find_text_files(draft, reversed(read.recipe.files))
    completed, _ = with_pretrained_model(copy.deepcopy(draft.tree))
    screen(draft, completed)
    screen_second_models(draft, completed)
    rename(draft, completed)
    _leave_out_unknown(draft, draft.tree, "")
    # Critic and teacher have been compared with the policy, so that equal keys need to stand only once.
    repeated, noted = "policy.generation.vllm_cfg.precision", {note.path for note in draft.notes}
    if repeated not in noted and (given := draft.get(repeated)) and given == draft.get("policy.precision"):
        draft.drop(repeated)
    config, warnings, problems = None, tuple[Problem, ...](), list[Problem]()
    try:
        config, warnings = check(read, draft.tree)
    except ConfigError as error:
        for one in error.problems:
            if one.code == "not-found" and one.path.endswith("model_name"):
                option = f"`migrate --model {one.path.partition('.')[0]}=NAME`"
                one = replace(one, remedy=f"the recipe leaves the choice to you: {option}")
            problems.append(one)
    leave_open(draft, problems)
    every = (*draft.problems, *problems)
    as_written = [replace(one, path=draft.origins.get(one.path, one.path)) for one in every]
    draft.tree = with_references(draft.tree, read.references)
    return Migrated(draft, read, config, warnings, read.located(as_written))


def _require_recipe(path: str | Path, tree: Tree) -> None:
    """Raise ConfigError unless the file is a complete NeMo RL recipe with one algorithm."""
    algorithms = [name for name in RUN_CONFIGS if isinstance(tree.get(name), dict)]
    policy, remedy = tree.get("policy"), "name a recipe of one algorithm"
    if len(algorithms) > 1:
        what = f"has the sections {' and '.join(algorithms)}"
    elif not algorithms:
        what = f"has none of the sections {', '.join(RUN_CONFIGS)}"
        others = [advice for key, advice in KEYS["other_commands"].items() if key in tree]
        remedy = [*others, f"{remedy} that this package has"][0]
    elif isinstance(policy, dict) and {"megatron_cfg", "dtensor_cfg"} & cast("Tree", policy).keys():
        return
    else:
        what = "is not a complete NeMo RL recipe: it has neither policy.megatron_cfg nor policy.dtensor_cfg"
        remedy = "name one, or set `defaults:` to the path of the exemplar that it changes"
    raise refused("wrong-kind", str(path), what, remedy)


def _require_text(draft: Draft) -> None:
    """Raise ConfigError for a recipe that trains on images or sound; its other keys are then irrelevant."""
    seen = ["policy.is_vlm"] * (draft.get("policy.is_vlm") is True)
    seen += [
        f"{place}.processor"
        for place, source in meaning.sources_of(draft)
        if source.get("processor") == "vlm_hf_data_processor"
    ]
    if seen:
        what = (
            f"{shown(draft.get(seen[0]))}: the recipe trains on images or sound; models here read text only"
        )
        raise refused("not-supported", seen[0], what)


def _with_name(tree: Any, name: object, model: str) -> Any:
    """Return a recipe or a part of it, with `name` replaced by `model` wherever it occurs."""
    if isinstance(tree, dict):
        return {key: _with_name(value, name, model) for key, value in cast("Tree", tree).items()}
    if isinstance(tree, list):
        return [_with_name(value, name, model) for value in cast("list[Any]", tree)]
    return model if tree == name else tree


_ROWS = re.compile(r"data\.(train|validation)\.data_path")


def leave_open(draft: Draft, problems: Iterable[Problem]) -> None:
    """Record unresolved problems, once per key."""
    noted = {note.path for note in draft.notes if note.kind is Kind.OPEN}
    for problem in problems:
        if problem.code in ("not-found", "not-readable") and (rows := _ROWS.fullmatch(problem.path)):
            option = f"`migrate --data {rows[1]}=FILE`"
            problem = replace(problem, remedy=f"the recipe leaves the choice to you: {option}")
        if problem.path not in noted:
            draft.note(Kind.OPEN, problem.path, "; ".join(filter(None, (problem.what, problem.remedy))))


def load_migrated(path: str | Path, overrides: Iterable[str] = ()) -> Migrated:
    """Migrate a NeMo RL recipe in memory; raises ConfigError for a key that does not carry over."""
    migrated = migrate(path, overrides)
    if not any(foreign_keys(migrated.read.tree)):
        what = "is not a NeMo RL recipe: all its keys are ours"
        raise refused("wrong-kind", str(path), what, "leave out --migrate")
    if migrated.problems:
        raise ConfigError(migrated.problems)
    return migrated


def _leave_out_unknown(draft: Draft, section: Tree, prefix: str) -> None:
    """Refuse keys that are neither in this package nor in the migration table."""
    kind = RUN_CONFIGS[draft.algorithm]
    for key, value in [*section.items()]:
        path = join_path(prefix, str(key))
        field, is_section = field_at(path, kind), isinstance(value, dict)
        if field is None and not prefix and not is_section:
            draft.drop(path)  # NeMo RL reads sections alone: this is a value for interpolations
        elif field is None:
            section.pop(key)
            nowhere = f"not a key of this package, nor of NeMo RL at {listed_origin()}"
            draft.refuse(path, value, nowhere, "unknown key")
        elif section_of(field) is not None:
            for place, inner in inner_sections(value):
                _leave_out_unknown(draft, inner, join_path(path, place))


EXIT_NO_FILE = 1
"""Exit status if no recipe is written."""


def run_migrate(
    recipe: str,
    output: str | None,
    overrides: Sequence[str],
    models: Mapping[str, str],
    examine: Callable[[RunConfig], Iterable[Problem]],
) -> int:
    """Write our recipe and copies of its prompt files, and print the report; return 2 if keys are left open.

    If a copy's name is taken, it is prefixed with the recipe's. examine: returns further problems of the migrated
    recipe, which are left open. Raises ConfigError for a file that is not a recipe, or would be overwritten.
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
        raise refused("not-writable", "--output", what) from error
    for line in report(migrated, target):
        write_line(sys.stdout, without_values(line, migrated.read.references))
    return 0 if migrated.settled else 2


def _require_free(target: Path) -> None:
    if target.exists():
        what = f"{target} exists already and is not overwritten"
        raise refused("already-there", "--output", what, "name another file")


def run_in_memory(recipe: str, overrides: Iterable[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    """Migrate a recipe and print the report; return configuration and warnings. Raises ConfigError."""
    migrated = load_migrated(recipe, overrides)
    assert migrated.config is not None
    for line in report(migrated):
        write_line(sys.stdout, without_values(line, migrated.read.references))
    return migrated.config, migrated.warnings


def report(migrated: Migrated, target: Path | None = None) -> Iterator[str]:
    """Yield the report: a line per group of keys, and a line per key that changed.

    target: the written file; without one, renamed keys and prompt files are only counted.
    """
    draft = migrated.draft
    noted = {note.path for note in draft.notes}
    kept = [path for path in leaf_paths(draft.tree) if path not in noted]
    yield f"{target or 'migrated from NeMo RL'}: {draft.algorithm}"
    yield f"kept: {len(kept)} keys"
    for kind in Kind:
        notes = [note for note in draft.notes if note.kind is kind]
        if notes:
            yield f"{kind.value}: {len(notes)}"
            # Without a file to read, these are of no interest one by one.
            short = not target and kind in (Kind.RENAMED, Kind.FILES)
            yield from (f"  {note}" for note in notes if not short)
    yield f"left out, without effect here: {len(draft.dropped)}"
    if target:
        yield f"next: `{command('check', '--config', str(target))}`"


def recipe_text(migrated: Migrated, source: str, overrides: Iterable[str] = ()) -> str:
    """Return our recipe as YAML; source, overrides: the original's, for the header.

    Comments after changed and open keys give the reasons; refused keys, and open keys that are missing, are listed in
    the header.
    """
    draft = migrated.draft
    dump: Any = partial(yaml.safe_dump, width=float("inf"), sort_keys=False, allow_unicode=True)

    def comment(words: str) -> str:
        return f"# {' '.join(without_values(words, migrated.read.references).split())}\n"

    text: str = dump(draft.tree, default_flow_style=False)
    lines, places = text.splitlines(keepends=True), dict[str, int]()
    for path, line, value in key_lines(yaml.SafeLoader(text).get_single_node(), ""):
        # The comment follows a one-line value; otherwise it follows the key.
        whole = cast("Any", value)
        in_one = isinstance(value, yaml.ScalarNode) or whole.flow_style
        places[path] = whole.end_mark.line if in_one else line - 1
    head = [f"Made by `nemo-rl-mcore migrate` from NeMo RL's {' '.join([source, *overrides])}."]
    behind: dict[int, list[str]] = {}
    for note in draft.notes:
        if note.kind in (Kind.CHANGED, Kind.OPEN) and note.path in places:
            behind.setdefault(places[note.path], []).append(note.what)
        elif note.kind is Kind.OPEN:
            head.append(f"Left for you to settle: {note}")
    for path, (value, remedy) in draft.refused.items():
        head.append(f"Refused: {dump({path: value}, default_flow_style=True).strip()[1:-1]}; {remedy}")
    for place, whats in behind.items():
        lines[place] = f"{lines[place].rstrip()}  {comment('; '.join(whats))}"
    return "".join([*map(comment, head), *lines])
