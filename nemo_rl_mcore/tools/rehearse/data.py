"""Rows of the form that a source's keys describe, where its own are not on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig

ROWS = 64
"""Of each source; no two prompts are equal."""
_HELD_OUT = 0.25
"""Share of the rows that a source holds out for validation, at least: a batch of them."""
LONGEST = 24
"""Characters of a made prompt at most."""
_KEPT = (
    *("prompt_file", "system_prompt_file", "processor", "input_key", "output_key", "columns", "answer"),
    *(
        "chat_key",
        "tool_key",
        "prompt_key",
        "chosen_key",
        "rejected_key",
        "ties",
        "split_validation_size",
        "weight",
    ),
    "streaming",
)
"""Keys of a source that say how a row is read, and not where it lies."""


def is_here(source: SourceConfig) -> bool:
    """Return whether all of a source's rows lie in files or a folder of this machine."""
    return bool(source.paths) and all(Path(path).exists() or _matches(path) for path in source.paths)


def _matches(pattern: str) -> bool:
    path = Path(pattern)
    return "*" in path.name and any(path.parent.glob(path.name))


def made_source(source: SourceConfig, kind: RowKind, file: Path, first: int = 0) -> Tree:
    """Write rows of the source's form, and return a section that reads them; first: number of the first row."""
    numbers = range(first, first + ROWS)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in _rows(source, kind, numbers)), encoding="utf-8")
    written = source.model_dump(mode="json")
    kept = {key: written[key] for key in _KEPT}
    if source.split_validation_size:
        kept["split_validation_size"] = max(_HELD_OUT, source.split_validation_size)
    if source.answer is not None and source.answer.regex is not None:
        kept["answer"] = None  # a made answer is all of its text
    return {**kept, "data_path": str(file)}


def _rows(source: SourceConfig, kind: RowKind, numbers: range) -> Iterator[Tree]:
    for number in numbers:
        asked, found = f"{number} + {number * 7 % 10} = ?", str(number + number * 7 % 10)
        row: Tree = dict.fromkeys(source.columns, f"{number}")
        if kind is RowKind.PAIRS:
            _put(row, source.prompt_key, asked)
            _put(row, source.chosen_key, found)
            _put(row, source.rejected_key, f"no{'!' * (number % 3)}")
        else:
            _put(row, source.input_key, asked)
            if source.output_key is not None:
                _put(row, source.output_key, _stated(source, found))
            if source.answer is not None and source.answer.key is not None:
                _put(row, source.answer.key, _stated(source, found))
        yield row


def _stated(source: SourceConfig, answer: str) -> str:
    """Return the answer as the source's rows state it: after a mark, or in a box."""
    how = source.answer
    if how is not None and how.after is not None:
        return f"It is so. {how.after} {answer}"
    return f"So \\boxed{{{answer}}}" if how is not None and how.boxed else answer


def _put(row: Tree, key: str, value: str) -> None:
    """Set a column; dots lead into columns that hold others."""
    *above, last = key.split(".")
    section = row
    for name in above:
        inner = section.setdefault(name, {})
        assert isinstance(inner, dict)
        section = inner
    section[last] = value


def variety(responses: Sequence[str]) -> list[float]:
    """Return for each response a number between 0 and 1 that depends on every character of it."""
    return [sum(ord(character) % 7 for character in text) / (6 * max(1, len(text))) for text in responses]


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
