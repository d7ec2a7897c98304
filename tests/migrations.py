"""Recipes of NeMo RL with changes, migrated."""

from pathlib import Path

from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import Migrated, migrate

FOLDER = Path(__file__).parent / "fixtures/nemo_rl"


def migrated_with(changes: str, base: str, folder: Path) -> Migrated:
    path = folder / "theirs.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{changes}\n")
    return migrate(path)


def told(result: Migrated, path: str) -> list[Kind]:
    return [note.kind for note in result.draft.notes if note.path == path]
