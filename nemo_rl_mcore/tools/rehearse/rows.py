"""The data of a rehearsal: the recipe's own where they are on this machine, else rows that are made."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.tools.rehearse.data import ROWS, is_here, made_source


def data_keys(config: RunConfig, folder: Path) -> Tree:
    """Return the keys of data; rows that are made are written into the folder."""
    if not config.data.from_files:
        return {}
    trained = [_source(config, path, source, folder) for path, source in config.train_sources.items()]
    validated = [_source(config, path, source, folder) for path, source in config.validation_sources.items()]
    for section in validated:
        section.pop("weight", None)
    keys: Tree = {
        "data.train": trained if isinstance(config.data.train, tuple) else trained[0],
        "data.validation": validated or None,
    }
    return keys


def _source(config: RunConfig, path: str, source: SourceConfig, folder: Path) -> Tree:
    if is_here(source):
        written = config.plain()
        section = value_at(written, path)
        assert isinstance(section, dict)
        return {**section, "repeat": min(2, source.repeat)}
    file = folder / f"{path}.jsonl"
    made = made_source(source, config.row_kind, file, first=0 if path.startswith("data.train") else ROWS)
    return {**made, "repeat": min(2, source.repeat)}
