"""The command `migrate`: reads their recipe, writes ours beside it, and says what became of each key."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.recipe.environment_values import without_values
from nemo_rl_mcore.recipe.foreign.recognised import leaf_paths
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import Migrated, leave_open, load_migrated, migrate
from nemo_rl_mcore.tools.migrate.text_files import copy_text_files
from nemo_rl_mcore.tools.migrate.writer import recipe_text

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
        copy_text_files(migrated.draft, target)
        with target.open("x", encoding="utf-8") as file:
            file.write(recipe_text(migrated, Path(recipe).name, overrides))
    except OSError as error:
        place = error.filename or target
        raise ConfigError(
            [Problem("not-writable", "--output", f"{place} cannot be written: {error.strerror}")]
        ) from error
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
