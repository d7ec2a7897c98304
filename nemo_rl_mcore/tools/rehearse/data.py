"""Rows of the form that a source's keys describe, where its own are not on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.environment import AnswerConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.tools.migrate.draft import put

ROWS = 64
"""Of each source; no two prompts are equal."""
_HELD_OUT = 0.25
"""Share of the rows that a source holds out for validation, at least: a batch of them."""
LONGEST = 24
"""Characters of a made prompt at most."""
_KEPT = (
    *("prompt_file", "system_prompt_file", "input_key", "output_key", "columns", "answer"),
    *("chat_key", "tool_key", "prompt_key", "chosen_key", "rejected_key", "ties", "split_validation_size"),
    "weight",
)
"""Keys of a source that say how a row is read, and not where it lies."""


def is_here(source: SourceConfig) -> bool:
    """Whether all of a source's rows lie in files or a folder of this machine."""
    paths = [Path(path) for path in source.paths]
    found = (path.exists() or ("*" in path.name and any(path.parent.glob(path.name))) for path in paths)
    return bool(paths) and all(found)


def made_source(source: SourceConfig, kind: RowKind, file: Path, first: int = 0) -> Tree:
    """Write rows of the source's form, and return a section that reads them; first: number of the first row."""
    lines = list[str]()
    how = source.answer if isinstance(source.answer, AnswerConfig) else None
    columns = [source.output_key, source.answer if isinstance(source.answer, str) else None]
    for number in range(first, first + ROWS):
        asked, found = f"{number} + {number * 7 % 10} = ?", str(number + number * 7 % 10)
        row: Tree = dict.fromkeys(source.columns, f"{number}")
        if kind is RowKind.PAIRS:
            put(row, source.prompt_key, asked)
            put(row, source.chosen_key, found)
            put(row, source.rejected_key, f"no{'!' * (number % 3)}")
        else:
            put(row, source.input_key, asked)
            stated = f"So \\boxed{{{found}}}" if how is not None and how.boxed else found
            if how is not None and how.after is not None:
                stated = f"It is so. {how.after} {found}"
            for key in columns:
                if key is not None:
                    put(row, key, stated)
        lines.append(f"{json.dumps(row)}\n")
    file.write_text("".join(lines), encoding="utf-8")
    written = source.model_dump(mode="json")
    kept = {key: written[key] for key in _KEPT}
    if source.split_validation_size:
        kept["split_validation_size"] = max(_HELD_OUT, source.split_validation_size)
    if how is not None and how.regex is not None:
        kept["answer"] = None  # a made answer is all of its text
    return {**kept, "data_path": str(file)}


def variety(responses: Sequence[str]) -> list[float]:
    """Return for each response a number between 0 and 1 that depends on every character of it."""
    return [sum(ord(character) % 7 for character in text) / (6 * max(1, len(text))) for text in responses]


def data_keys(config: RunConfig, folder: Path) -> Tree:
    """Return the keys of data; rows that are made are written into the folder."""
    if not config.data.from_files:
        return {}
    written, trained, validated = config.plain(), list[Tree](), list[Tree]()
    for path, source in (config.train_sources | config.validation_sources).items():
        trains = path in config.train_sources
        if is_here(source):
            section = dict(cast("Tree", value_at(written, path)))
        else:
            first = 0 if trains else ROWS
            section = made_source(source, config.row_kind, folder / f"{path}.jsonl", first)
        section["repeat"] = min(2, source.repeat)
        if not trains:
            section.pop("weight", None)
        (trained if trains else validated).append(section)
    return {
        "data.train": trained if isinstance(config.data.train, tuple) else trained[0],
        "data.validation": validated or None,
    }
