"""Rows of a source as they lie there, and the prompts of a file.

JSON and JSONL are read here, every other format by the library `datasets`, which is imported where one is named. It
runs no code of a data set: what releases before 4 did only with trust_remote_code is gone from it.
"""

# datasets leaves most of its types open.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import codecs
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Code, Problem
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import is_hub_id
from nemo_rl_mcore.data.messages import (
    as_object,
    read_row_message,
)
from nemo_rl_mcore.data.strict_json import may_be_torn, parse_json, read_json, read_regular, torn_text
from nemo_rl_mcore.errors import RefusedError, quoted, shortened

if TYPE_CHECKING:
    from datasets import Dataset

_LIBRARY_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""What the library calls the formats of files that it reads, by the end of their names."""
_OF_PARTS, _OF_A_PART = "dataset_dict.json", "state.json"
_BUFFER = 10_000
"""Rows of a stream that the next one is drawn from."""
_PLACE = "__place__"
"""The column that keeps a row's place in the stream through the shuffle."""
_TORN = "half a surrogate pair, which is no character, in"


@dataclass(frozen=True)
class Row:
    """A row and its place; `wrong` says what keeps it from being one. of_lines: each row has columns of its own."""

    place: str
    values: Mapping[str, object]
    wrong: str = ""
    of_lines: bool = True


class SourceError(ValueError):
    """A source that cannot be read: the key of it to blame, what is wrong, and the way out."""

    def __init__(self, code: Code, key: str, what: str, remedy: str) -> None:
        super().__init__(f"{key}: {what}; {remedy}")
        self.problem = Problem(code, key, what, remedy)


def is_fetched(source: SourceConfig) -> bool:
    """Return whether the rows are those of a data set of the hub: a name without a file or folder of that name."""
    return any(_is_hub_name(path) for path in source.paths)


def _is_hub_name(path: str) -> bool:
    known = Path(path).suffix in (*_LIBRARY_FORMATS, ".json", ".jsonl")
    return is_hub_id(path) and not known and not Path(path).exists()


def read_rows(source: SourceConfig) -> Sequence[Row]:
    """Return all rows of a source; raises SourceError."""
    [first, *others] = source.paths
    rows = list[Row]()
    try:
        if _is_hub_name(first) or Path(first).is_dir():
            if others:
                what = f"{first!r} is no file, and not alone"
                raise SourceError("wrong-kind", "data_path", what, "name files, or one folder")
            return _read_data_set(source)
        if source.subset is not None:
            what = f"{source.subset!r} does not go with files"
            raise SourceError("incompatible", "subset", what, "remove it")
        for path in source.paths:
            found = sorted(glob(path)) if "*" in path else [path]
            if not found:
                what = f"no file matches {path!r} in {Path.cwd()}"
                raise SourceError("not-found", "data_path", what, "correct the pattern")
            rows += [row for file in found for row in _read_file(file)]
        if source.split in (None, "train"):
            return rows
        ranges = _named_ranges(source.split, {"train": len(rows)})
        return [row for _, start, end in ranges for row in rows[start:end]]
    except MemoryError as error:
        what = f"{', '.join(map(repr, source.paths))}: more rows than this machine has memory for"
        remedy = "set streaming: true, name a part of them, or a larger machine"
        raise SourceError("too-large", "data_path", what, remedy) from error


def _read_file(path: str) -> list[Row]:
    if (name := _LIBRARY_FORMATS.get(Path(path).suffix)) is not None:
        if not Path(path).is_file():
            what = f"{path!r} cannot be read from {Path.cwd()}: no such file"
            raise SourceError("not-found", "data_path", what, "correct the path")
        found = _loaded(path, data_files=path, format=name, split="train")
        return [*_library_rows(found, f"{path}, row")]
    try:
        content = read_regular(Path(path)).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        what = f"{path!r} cannot be read from {Path.cwd()}: {error.strerror}"
        remedy = "name files, a folder or a data set of the hub"
        raise SourceError("not-readable", "data_path", what, remedy) from error
    if Path(path).suffix == ".json" and content.lstrip()[:1] == b"[":
        try:
            values = cast("list[object]", parse_json(content))
        except ValueError as error:
            what = f"{path!r} is not JSON: {error}"
            raise SourceError("not-readable", "data_path", what, "correct it") from error
        torn = may_be_torn(content)
        places = (f"{path}, row {number}" for number in range(1, len(values) + 1))
        rows = [_row_of(place, value, torn=torn) for place, value in zip(places, values, strict=True)]
    else:
        rows = [*_rows_of_lines(path, content.splitlines())]
    if not rows:
        what = f"{path!r} holds no row"
        raise SourceError("too-few-rows", "data_path", what, "name a file with an object a line")
    return rows


def _rows_of_lines(path: str, lines: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of JSONL, each with its file:line; what is wrong with a line is in its row."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                yield _row_of(place, parse_json(line), torn=may_be_torn(line))
            except ValueError as error:
                yield Row(place, {}, f"not JSON: {error}")


def _row_of(place: str, value: object, *, torn: bool) -> Row:
    """Return a value that was read from JSON as a row; torn: its text may be none that a tokenizer takes."""
    if torn and (text := torn_text(value)):
        return Row(place, {}, f"{_TORN} {text}")
    if isinstance(value, dict):
        return Row(place, cast("dict[str, object]", value))
    return Row(place, {}, f"not an object but {type(value).__name__}")


def _read_data_set(source: SourceConfig) -> Sequence[Row]:
    """Return the rows of a folder or of a data set of the hub."""
    import datasets

    path, split = source.paths[0], source.split or "train"
    if _is_saved(Path(path)):
        _require_inside(Path(path))
        with _telling(path):
            whole = datasets.load_from_disk(path)
        parts = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": whole}
        ranges = _named_ranges(split, {str(name): len(part) for name, part in parts.items()})
        chosen = [parts[name].select(range(start, end)) for name, start, end in ranges]
        none = next(iter(parts.values())).select([])
        found = datasets.concatenate_datasets(chosen) if chosen else none
    else:
        found = _loaded(path, subset=source.subset, split=split)
    rows = [*_library_rows(found, f"{path}, {split}, row")]
    if not rows:
        raise SourceError("too-few-rows", "split", f"{split!r} of {path!r} holds no row", "name another one")
    return rows


def _library_rows(found: Dataset, place: str) -> Iterator[Row]:
    for number, values in enumerate(cast("Iterator[dict[str, object]]", found), start=1):
        yield Row(f"{place} {number}", values, of_lines=False)


def read_stream(source: SourceConfig, seed: int | None) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a source, each with its place in it, without a copy of them; raises SourceError.

    seed: of the order, in which each row is drawn from those that a buffer holds; None for the order in which they lie.
    """
    import datasets

    path, split = source.paths[0], source.split or "train"
    files = [file for one in source.paths for file in sorted(glob(one)) or [one]]
    suffix = Path(files[0]).suffix
    stream: Any
    if not (Path(path).is_file() or "*" in path or len(source.paths) > 1):
        if _is_saved(Path(path)):
            what = f"{path!r} was saved by save_to_disk"
            raise SourceError("incompatible", "streaming", what, "set it to false")
        stream = _loaded(path, subset=source.subset, split=split, streaming=True)
    elif suffix != ".jsonl" or split != "train":
        name = _LIBRARY_FORMATS.get(suffix, "json")
        stream = _loaded(path, format=name, data_files=files, split=split, streaming=True)
    else:
        with _telling(path):  # the library would guess a type for each column
            stream = datasets.IterableDataset.from_generator(_objects, gen_kwargs={"files": files})

    def placed(row: dict[str, object], place: int) -> dict[str, object]:
        return {**row, _PLACE: place}

    rows = stream.map(placed, with_indices=True)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=_BUFFER)
    rest = iter(cast("Iterable[dict[str, object]]", rows))
    while True:
        try:
            values = next(rest)
        except StopIteration:
            return
        except Exception as error:  # whatever class the format's library raises
            what = f"a row cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
            raise SourceError("wrong-row", "data_path", what, "mend it") from error
        place = cast("int", values.pop(_PLACE))
        yield place, Row(f"{path}, row {place + 1}", values)


def _objects(files: list[str]) -> Iterator[object]:
    """Yield the objects of files of JSONL, one after the other."""
    for path in files:
        with Path(path).open("rb") as lines:
            for row in _rows_of_lines(path, lines):
                if row.wrong:
                    raise ValueError(f"{row.place}: {row.wrong}")
                yield row.values


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_OF_PARTS, _OF_A_PART))


def _require_inside(folder: Path) -> None:
    """Raise SourceError where the files that save_to_disk has written name others than those of their folder."""
    remedy = "name a folder as save_to_disk writes it"
    files = [(folder / _OF_A_PART, "_data_files")]
    if (folder / _OF_PARTS).is_file():
        files = [(folder / _OF_PARTS, "splits")]
    for file, key in files:
        try:
            found = as_object(read_json(file)).get(key)
        except (OSError, ValueError) as error:
            what = f"{str(file)!r} cannot be read: {error}"
            raise SourceError("not-readable", "data_path", what, remedy) from error
        if not isinstance(found, list):
            what = f"{str(file)!r}: {key} is {quoted(found)}, and no list"
            raise SourceError("not-readable", "data_path", what, remedy)
        for entry in cast("list[object]", found):
            name = as_object(entry).get("filename") if key == "_data_files" else entry
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                what = f"{str(file)!r} names {quoted(name)}, which is no file of its folder"
                raise SourceError("not-readable", "data_path", what, remedy)
            if key == "splits":  # its files are looked at after those that stand here
                files.append((folder / name / _OF_A_PART, "_data_files"))


def _loaded(path: str, *, format: str = "", subset: str | None = None, **options: Any) -> Any:
    """Return what the library loads, see `datasets.load_dataset`; format: of files."""
    import datasets

    with _telling(path):
        if format == "csv":
            # Cells are text: else 007 is 7, a 72 beside a 1.5 is 72.0, and the word None is no text.
            import pandas

            given = options["data_files"]
            columns = pandas.read_csv(given if isinstance(given, str) else given[0], nrows=0).columns
            features = datasets.Features({str(column): datasets.Value("string") for column in columns})
            options.update(features=features, keep_default_na=False)
        return datasets.load_dataset(format or path, subset, **options)


@contextmanager
def _telling(path: str) -> Generator[None]:
    """Tell by a SourceError why the library does not load something; it raises classes of five other libraries."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(CRITICAL)  # it logs what it raises too
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None
        text = " ".join(str(cause or error).split())
        for key, signs in (
            ("split", ("unknown split", "split name")),
            ("subset", ("builderconfig", "config name is missing")),
        ):
            if any(sign in text.lower() for sign in signs):
                what = f"{path!r}: {shortened(text, 300)}"
                raise SourceError("not-found", key, what, "name one of those") from error
        what = f"{path!r} cannot be read ({type(cause or error).__name__}: {shortened(text, 200)})"
        remedy = "name files, a folder, or a data set of the hub; fetch that where there is a network"
        raise SourceError("not-readable", "data_path", what, remedy) from error


def _named_ranges(split: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return the part, the first row and the end of each of `split`, such as test[10:20]+train[:90%]."""
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        what = f"{split!r} is not there: {' '.join(str(error).split())}"
        remedy = f"known: {', '.join(sizes)}, and parts such as {next(iter(sizes))}[:90%]"
        raise SourceError("not-found", "split", what, remedy) from error
    return [(part.splitname, part.from_ or 0, part.to or 0) for part in parts]


def read_prompts(path: Path, input_key: str | None = None) -> list[Prompt]:
    """Return the prompts of a file: a text with a prompt a line, or JSONL with a prompt or messages a line.

    In order, without empty lines. input_key: of the text or the messages, before the keys `prompt` and `messages`.
    Raises ValueError, naming file and line.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").split("\n")
    except OSError as error:
        what = f"{str(path)!r} cannot be read: {error.strerror}"
        raise RefusedError(what, code="unreadable-file") from error
    except UnicodeDecodeError as error:
        raise RefusedError(f"{str(path)!r} is no text: {error}", code="no-text") from error
    keys = [*dict.fromkeys(key for key in (input_key, "prompt", "messages") if key is not None)]
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        place, key = f"{path}:{number}", None
        if not line.strip():
            continue
        given: object = line.removesuffix("\r")
        if path.suffix == ".jsonl":
            try:
                row = parse_json(line)
            except ValueError as error:
                raise RefusedError(f"{place}: not JSON: {error}", code="no-json") from error
            if torn := torn_text(row):
                raise RefusedError(f"{place}: {_TORN} {torn}", code="no-text")
            if (key := next((key for key in keys if key in as_object(row)), None)) is None:
                what = f"{place}: no object with one of the keys {', '.join(keys)}"
                raise RefusedError(what, code="no-prompt-key")
            given = as_object(row)[key]
        prompts.append(replace(prompt_of(given, place, key or ""), index=len(prompts)))
    if not prompts:
        raise RefusedError(f"{str(path)!r} holds no prompt", code="no-prompt")
    return prompts


def prompt_of(given: object, place: str, key: str = "") -> Prompt:
    """Return a text, or a conversation as a list of messages, as a prompt; raises RefusedError for all else.

    key: that it stands under, for the message.
    """
    if isinstance(given, str):
        return Prompt(0, given, "", place=place)
    turns = cast("Sequence[object]", given if isinstance(given, list | tuple) else [])
    name = key or "messages"
    try:
        messages = tuple(read_row_message(turn, f"{name}[{number}]") for number, turn in enumerate(turns))
    except ValueError as error:
        raise RefusedError(f"{place}: {error}", code="prompt-type") from error
    if not messages:
        shown = quoted(cast("object", given))
        what = f"{place}: {key or 'a prompt'} is {shown}, and must be text or a list of messages"
        raise RefusedError(what, code="prompt-type")
    return Prompt(0, "", "", context=messages, place=place)
