"""The command `migrate`: reads their recipe, writes ours beside it, and says what became of each key."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.recipe.environment_values import without_values
from nemo_rl_mcore.recipe.of_nemo_rl import leaf_paths
from nemo_rl_mcore.recipe.sources import key_lines
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind
from nemo_rl_mcore.tools.migrate.migrate import Migrated, leave_open, load_migrated, migrate

EXIT_OPEN = 2
"""Exit status where the recipe is written and does not say all that theirs said."""
EXIT_NO_FILE = 1
"""Exit status where no recipe is written."""


def run_migrate(
    recipe: str,
    output: str | None,
    overrides: Sequence[str],
    examine: Callable[[RunConfig], Iterable[Problem]],
) -> int:
    """Write our recipe and the report; raises ConfigError for what is no recipe, or would be overwritten.

    examine: what `check` says of a recipe beyond its keys; it is left open.
    """
    target = Path(output or f"{Path(recipe).stem}_mcore.yaml")
    _require_free(target)
    migrated = migrate(recipe, overrides)
    if migrated.config is not None:
        leave_open(migrated.draft, examine(migrated.config))
    try:
        _copy_text_files(migrated.draft, target)
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


def _copy_text_files(draft: Draft, target: Path) -> None:
    """Copy the prompts that were found next to our recipe, which names the copies; raises OSError.

    Where a file of that name says something else, the copy has the recipe's name before its own.
    """
    for path, found in draft.files.items():
        if not draft.has(path):
            continue
        content, copy = found.read_bytes(), target.with_name(found.name)
        if copy.exists() and copy.read_bytes() != content:
            copy = target.with_name(f"{target.stem}_{found.name}")
            if copy.exists() and copy.read_bytes() != content:
                _require_free(copy)
        if not copy.exists():
            copy.write_bytes(content)
        place, _, key = path.rpartition(".")
        draft.section(place)[key] = copy.name
        draft.note(Kind.FILES, path, f"{copy.name}, a copy of {found}")


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
    lines, places = text.splitlines(keepends=True), dict(_ends(yaml.SafeLoader(text).get_single_node()))
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


def _ends(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Yield the path of each key, and the line that a comment may stand behind: of a section, that of its name."""
    for path, line, value in key_lines(node, ""):
        whole = cast("Any", value)
        in_one = isinstance(value, yaml.ScalarNode) or whole.flow_style
        yield path, whole.end_mark.line if in_one else line - 1
