"""The command `migrate`: reads their recipe, writes ours beside it, and says what became of each key."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.environment_values import without_values
from nemo_rl_mcore.config.foreign.judgement import Tree
from nemo_rl_mcore.config.migration.draft import Kind
from nemo_rl_mcore.config.migration.migrate import Migrated, migrate
from nemo_rl_mcore.config.migration.writer import recipe_text
from nemo_rl_mcore.output import write_line

_WIDTH = 120
EXIT_OPEN = 2
"""Exit status where the recipe is written and does not say all that theirs said."""


def run_migrate(recipe: str, output: str | None) -> int:
    """Write our recipe and the report; raises ConfigError for what is no recipe, or would be overwritten."""
    target = Path(output or f"{Path(recipe).stem}_mcore.yaml")
    _require_free(target)
    migrated = migrate(recipe)
    text = recipe_text(migrated, Path(recipe).name)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError([Problem("--output", f"{target} cannot be written: {error.strerror}")]) from error
    for line in report(migrated, target):
        write_line(sys.stdout, without_values(line, migrated.references))
    return 0 if migrated.settled else EXIT_OPEN


def _require_free(target: Path) -> None:
    if target.exists():
        what = f"{target} is there already, and is not overwritten"
        raise ConfigError([Problem("--output", what, "name another file")])


def report(migrated: Migrated, target: Path) -> Iterator[str]:
    """What became of the keys: a line for each group, and one for each key that is not as it was."""
    draft = migrated.draft
    said = {note.path for note in draft.notes}
    kept = [path for path in _leaves(draft.tree, "") if path not in said]
    yield f"{target}: a recipe of {draft.algorithm}"
    yield f"kept as they are: {len(kept)} keys"
    for kind in Kind:
        notes = [note for note in draft.notes if note.kind is kind]
        if notes:
            yield f"{kind.value}: {len(notes)}"
            yield from (f"  {note}" for note in notes)
    yield f"left out at values that change nothing here: {len(draft.dropped)}"
    yield from _names_by_section(draft.dropped)
    yield f"next: nemo-rl-mcore check --config {target}"


def _names_by_section(paths: list[str]) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for path in paths:
        section, _, key = path.rpartition(".")
        sections.setdefault(section or "top level", []).append(key)
    for section, keys in sections.items():
        yield from textwrap.wrap(
            f"{section}: {', '.join(keys)}", _WIDTH, initial_indent="  ", subsequent_indent="    "
        )


def _leaves(section: Tree, prefix: str) -> Iterator[str]:
    for key, value in section.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from _leaves(cast("Tree", value), path)
        else:
            yield path
