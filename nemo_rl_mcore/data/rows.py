"""Rows of a source as they lie there; JSON and JSONL are read here, every other format by the library `datasets`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.hub_cache import is_hub_id
from nemo_rl_mcore.data.library_rows import LIBRARY_FORMATS, ranges_of, read_data_set, read_library_file
from nemo_rl_mcore.data.row import Row, SourceError, row_of, rows_of_lines
from nemo_rl_mcore.data.strict_json import may_be_torn, parse_json, read_regular

_OWN_FORMATS = (".json", ".jsonl")


def is_fetched(source: SourceConfig) -> bool:
    """Return whether the rows are those of a data set of the hub: a name without a file or folder of that name."""
    return any(_is_hub_name(path) for path in source.paths)


def _is_hub_name(path: str) -> bool:
    known = Path(path).suffix in (*LIBRARY_FORMATS, *_OWN_FORMATS)
    return is_hub_id(path) and not known and not Path(path).exists()


def read_rows(source: SourceConfig) -> Sequence[Row]:
    """Return all rows of a source; raises SourceError."""
    try:
        return _read_rows(source)
    except MemoryError as error:
        what = f"{', '.join(map(repr, source.paths))}: more rows than this machine has memory for"
        raise SourceError(
            "too-large", "data_path", what, "set streaming: true, name a part of them, or a larger machine"
        ) from error


def _read_rows(source: SourceConfig) -> Sequence[Row]:
    [first, *others] = source.paths
    if _is_hub_name(first) or Path(first).is_dir():
        if others:
            raise SourceError(
                "wrong-kind", "data_path", f"{first!r} is no file, and not alone", "name files, or one folder"
            )
        return read_data_set(source)
    if source.subset is not None:
        raise SourceError("incompatible", "subset", f"{source.subset!r} does not go with files", "remove it")
    return _part([row for path in _files(source) for row in read_file(path)], source.split)


def _files(source: SourceConfig) -> Iterator[str]:
    for path in source.paths:
        found = sorted(glob(path)) if "*" in path else [path]
        if not found:
            raise SourceError(
                "not-found", "data_path", f"no file matches {path!r} in {Path.cwd()}", "correct the pattern"
            )
        yield from found


def _part(rows: Sequence[Row], split: str | None) -> Sequence[Row]:
    """Return the rows of files that a split names: they are all of train."""
    if split in (None, "train"):
        return rows
    return [row for start, end in ranges_of(split, {"train": len(rows)}) for row in rows[start:end]]


def read_file(path: str) -> Iterator[Row]:
    """Yield the rows of a file."""
    if (name := LIBRARY_FORMATS.get(Path(path).suffix)) is not None:
        yield from read_library_file(path, name)
        return
    try:
        content = read_regular(Path(path)).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        what = f"{path!r} cannot be read from {Path.cwd()}: {error.strerror}"
        raise SourceError(
            "not-readable", "data_path", what, "name files, a folder or a data set of the hub"
        ) from error
    is_list = Path(path).suffix == ".json" and content.lstrip()[:1] == b"["
    rows = [*(_elements(path, content) if is_list else rows_of_lines(path, content.splitlines()))]
    if not rows:
        raise SourceError(
            "too-few-rows", "data_path", f"{path!r} holds no row", "name a file with an object a line"
        )
    yield from rows


def _elements(path: str, content: bytes) -> Iterator[Row]:
    try:
        values = cast("list[object]", parse_json(content))
    except ValueError as error:
        raise SourceError(
            "not-readable", "data_path", f"{path!r} is not JSON: {error}", "correct it"
        ) from error
    torn = may_be_torn(content)
    for number, value in enumerate(values, start=1):
        yield row_of(f"{path}, row {number}", value, torn=torn)
