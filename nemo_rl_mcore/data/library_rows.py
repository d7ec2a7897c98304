"""Rows that the library `datasets` reads: parquet, CSV, folders, data sets of the hub; imported where one is named.

It runs no code of a data set: what releases before 4 did only with trust_remote_code is gone from it.
"""

# datasets leaves most of its types open.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.row import Row, SourceError, rows_of_lines
from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.errors import quoted, shortened

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

LIBRARY_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""What the library calls the formats of files that it reads, by the end of their names."""
_OF_PARTS, _OF_A_PART = "dataset_dict.json", "state.json"
_SAVED = "name a folder as save_to_disk writes it"


def read_library_file(path: str, name: str) -> Iterator[Row]:
    """Yield the rows of one file in a format of the library."""
    import datasets

    if not Path(path).is_file():
        raise SourceError(
            "not-found",
            "data_path",
            f"{path!r} cannot be read from {Path.cwd()}: no such file",
            "correct the path",
        )

    def load() -> Any:
        return datasets.load_dataset(name, data_files=path, split="train", **_as_written(name, path))

    found = _loaded(path, load)
    yield from _rows(found, f"{path}, row")


def read_data_set(source: SourceConfig) -> Sequence[Row]:
    """Return the rows of a folder or of a data set of the hub."""
    import datasets

    path, split = source.paths[0], source.split or "train"
    if _is_saved(Path(path)):
        _require_inside(Path(path))
        whole = _loaded(path, lambda: datasets.load_from_disk(path))
        parts = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": cast("Dataset", whole)}
        first = next(iter(parts.values()))
        ranges = named_ranges(split, {str(name): len(part) for name, part in parts.items()})
        chosen = [parts[name].select(range(start, end)) for name, start, end in ranges]
        found = datasets.concatenate_datasets(chosen) if chosen else first.select([])
    else:
        found = _loaded(path, lambda: datasets.load_dataset(path, source.subset, split=split))
    rows = [*_rows(found, f"{path}, {split}, row")]
    if not rows:
        raise SourceError("too-few-rows", "split", f"{split!r} of {path!r} holds no row", "name another one")
    return rows


def open_stream(source: SourceConfig) -> IterableDataset:
    """Return the rows of a source one after the other, without a copy of them; raises SourceError."""
    import datasets

    path, split = source.paths[0], source.split or "train"
    if Path(path).is_file() or "*" in path or len(source.paths) > 1:
        files = [file for one in source.paths for file in sorted(glob(one)) or [one]]
        opened = _loaded(path, lambda: _stream_of_files(files, split))
    elif _is_saved(Path(path)):
        raise SourceError(
            "incompatible", "streaming", f"{path!r} was saved by save_to_disk", "set it to false"
        )
    else:
        opened = _loaded(
            path, lambda: datasets.load_dataset(path, source.subset, split=split, streaming=True)
        )
    return cast("IterableDataset", opened)


def _stream_of_files(files: list[str], split: str) -> Any:
    import datasets

    suffix = Path(files[0]).suffix
    name = LIBRARY_FORMATS.get(suffix)
    if suffix == ".jsonl" and split == "train":
        return datasets.IterableDataset.from_generator(_objects, gen_kwargs={"files": files})
    options = _as_written(name, files[0]) if name else {}
    return datasets.load_dataset(name or "json", data_files=files, split=split, streaming=True, **options)


def _objects(files: list[str]) -> Iterator[object]:
    """Yield the objects of files of JSONL, one after the other; the library would guess a type for each column."""
    for path in files:
        with Path(path).open("rb") as lines:
            for row in rows_of_lines(path, lines):
                if row.wrong:
                    raise ValueError(f"{row.place}: {row.wrong}")
                yield row.values


def _as_written(name: str, path: str) -> dict[str, Any]:
    """Return what has cells of CSV be text: else 007 is 7, a 72 beside a 1.5 is 72.0, and the word None is no text."""
    import datasets

    if name != "csv":
        return {}
    import pandas

    columns = pandas.read_csv(path, nrows=0).columns
    features = datasets.Features({str(column): datasets.Value("string") for column in columns})
    return {"features": features, "keep_default_na": False}


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_OF_PARTS, _OF_A_PART))


def _require_inside(folder: Path) -> None:
    """Raise SourceError where the files that save_to_disk has written name others than those of their folder."""
    parts = _names(folder / _OF_PARTS, "splits") if (folder / _OF_PARTS).is_file() else [""]
    for part in parts:
        for entry in _values(folder / part / _OF_A_PART, "_data_files"):
            name = entry.get("filename") if isinstance(entry, dict) else None
            _require_name(folder / part / _OF_A_PART, name)


def _names(file: Path, key: str) -> list[str]:
    return [_require_name(file, name) for name in _values(file, key)]


def _values(file: Path, key: str) -> list[object]:
    try:
        content = parse_json(read_regular(file))
    except (OSError, ValueError) as error:
        raise SourceError(
            "not-readable", "data_path", f"{str(file)!r} cannot be read: {error}", _SAVED
        ) from error
    found = cast("dict[str, object]", content).get(key) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise SourceError(
            "not-readable",
            "data_path",
            f"{str(file)!r}: {key} is {quoted(found)}, and no list",
            _SAVED,
        )
    return cast("list[object]", found)


def _require_name(file: Path, name: object) -> str:
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        what = f"{str(file)!r} names {quoted(name)}, which is no file of its folder"
        raise SourceError("not-readable", "data_path", what, _SAVED)
    return name


def _rows(found: Dataset, place: str) -> Iterator[Row]:
    for number, values in enumerate(cast("Iterator[dict[str, object]]", found), start=1):
        yield Row(f"{place} {number}", values, of_lines=False)


def _loaded(path: str, load: Callable[[], Any]) -> Any:
    """Return what the library loads, or why it does not; it raises classes of five other libraries."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(CRITICAL)  # it logs what it raises too
    try:
        return load()
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None
        text = " ".join(str(cause or error).split())
        if "Unknown split" in text or "split name" in text.lower():
            raise SourceError(
                "not-found", "split", f"{path!r}: {shortened(text, 200)}", "name one of those"
            ) from error
        if "BuilderConfig" in text or "Config name is missing" in text:
            raise SourceError(
                "not-found", "subset", f"{path!r}: {shortened(text, 300)}", "name one of those"
            ) from error
        what = f"{path!r} cannot be read ({type(cause or error).__name__}: {shortened(text, 200)})"
        remedy = "name files, a folder, or a data set of the hub; fetch that where there is a network"
        raise SourceError("not-readable", "data_path", what, remedy) from error


def ranges_of(split: str, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the rows of files that a split such as train[:90%] names, as the library counts; raises SourceError."""
    return [(start, end) for _, start, end in named_ranges(split, sizes)]


def named_ranges(split: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return the split, the first row and the end of each part of `split`, such as test[10:20]+train[:90%]."""
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        known = ", ".join(sizes)
        what = f"{split!r} is not there: {' '.join(str(error).split())}"
        raise SourceError(
            "not-found", "split", what, f"known: {known}, and parts such as {next(iter(sizes))}[:90%]"
        ) from error
    return [(part.splitname, part.from_ or 0, part.to or 0) for part in parts]
