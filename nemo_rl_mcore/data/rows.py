"""Rows of a source as they lie there, and the prompts and answers that their columns hold.

JSON and JSONL are read here, every other format by the library `datasets`, which is imported where one is named. It
runs no code of a data set: what releases before 4 did only with trust_remote_code is gone from it.
"""

# datasets leaves most of its types open.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import glob
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_mcore.config.base import Code, Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import is_hub_id
from nemo_rl_mcore.data.messages import (
    Context,
    Extras,
    Message,
    MessageError,
    Tools,
    as_object,
    read_row_message,
)
from nemo_rl_mcore.data.strict_json import may_be_torn, parse_json, read_json, read_regular, torn_text
from nemo_rl_mcore.errors import RefusedError, code_of, quoted, shortened

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


_ASSISTANT = "assistant"
GYM_COLUMN = "responses_create_params"
"""The column of a row of NeMo Gym's that has the first call of its agent."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": _ASSISTANT}
_NEEDS_TEMPLATE = "which needs data.apply_chat_template: true"


class RowError(RefusedError):
    """What is wrong with a row."""


class ColumnError(RowError):
    """A column that is not there, and the key of the source that names it."""

    def __init__(self, setting: str, what: str) -> None:
        super().__init__(what)
        self.setting = setting


class RowReader:
    """Reads the rows of a source for an algorithm; `chat` allows conversations."""

    def __init__(self, source: SourceConfig, kind: RowKind, *, chat: bool) -> None:
        self._source = source
        self._kind = kind
        self._chat = chat

    def read(self, row: Row) -> Prompt | None:
        """Return a row before it gets its texts and its index; None for a pair without a better answer.

        Raises RowError.
        """
        if row.wrong:
            raise RowError(row.wrong)
        source, values = self._source, row.values
        if not row.of_lines:  # a library fills in nulls for fields that a message or tool has not
            keys = {source.chat_key, source.input_key, source.prompt_key, source.chosen_key}
            keys |= {source.rejected_key, source.tool_key or ""}
            keys |= {"context", "completions", "response1", "response2"}
            values = {key: _filled(value) if key in keys else value for key, value in values.items()}
        ranked = _ranked_answers(values)
        if GYM_COLUMN in values and source.input_key not in values and ranked is None:
            return replace(self._of_gym(values), place=row.place)
        if ranked is not None and source.prompt_key not in values:
            read = self._ranked(*ranked)
        elif self._kind is RowKind.PAIRS:
            read = self._pair(values)
        else:
            read = self._answered(values)
            columns = {name: _value(row.values, "columns", name) for name in source.columns}
            read = replace(read, columns=columns)
        tools = self._tools(values)
        return read and replace(read, place=row.place, extras=replace(read.extras, tools=tools))

    def _tools(self, values: Mapping[str, object]) -> Tools:
        """Return the functions that answers of a row may call: a list, or its JSON as text."""
        key = self._source.tool_key
        given = None if key is None or not self._chat else values.get(key)
        if isinstance(given, str) and given:
            with suppress(ValueError):
                given = parse_json(given)
        if not given:
            return ()
        if not _as_list(given) or not all(isinstance(one, dict) for one in _as_list(given)):
            raise RowError(
                f"{key} is {_shown(values[str(key)])}, and must be a list of functions; "
                "set tool_key to another column, or to null"
            )
        return cast("Tools", given)

    def _answered(self, values: Mapping[str, object]) -> Prompt:
        source = self._source
        # A library that knows columns has a null where a row of this one has none.
        if self._kind is RowKind.ANSWERS and (
            values.get(source.chat_key) is not None
            or (source.chat_key in values and values.get(source.input_key) is None)
        ):
            turns = self._messages(values[source.chat_key], source.chat_key)
            if len(turns) < 2 or turns[-1].role != _ASSISTANT:
                raise RowError(f"{source.chat_key} does not end with an assistant's answer to a message")
            extras = Extras(answer=_beyond_text(turns[-1]), own_turn=True)
            read = _prompt(turns[:-1], turns[-1].content, imitate_all=True, extras=extras)
        else:
            context = self._context(_value(values, "input_key", source.input_key), source.input_key)
            answer = Message(_ASSISTANT, "")
            if source.output_key is not None:
                answer = self._answer(_value(values, "output_key", source.output_key), source.output_key)
            read = _prompt(context, answer.content, extras=Extras(answer=_beyond_text(answer)))
        how = source.answer
        if how is None:
            return read
        # What is scored against stands beside what is imitated.
        text = read.answer
        if how.key is not None:
            text = self._answer(_value(values, "answer.key", how.key), how.key).content
        found = how.extract(text) if how.in_text else text.strip() or None
        if found is None:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
            lacking = how.lacking if how.in_text else "is empty"
            return replace(read, unscored=f"the answer {shown!r} {lacking}")
        return replace(read, answer=found, solution=read.answer if self._kind is RowKind.ANSWERS else None)

    def _of_gym(self, values: Mapping[str, object]) -> Prompt:
        """Return what an agent of NeMo Gym's begins with, as far as the row has it, and all columns for the agent.

        Of the items of OpenAI's Responses API that are the texts of messages; calls of tools and the like are left out.
        """
        if not self._chat:
            raise RowError(f"{GYM_COLUMN} is a conversation, {_NEEDS_TEMPLATE}")
        asked = as_object(values[GYM_COLUMN]).get("input")
        messages = list[Message]()
        for item in [{"role": "user", "content": asked}] if isinstance(asked, str) else _as_list(asked):
            role, content = as_object(item).get("role"), as_object(item).get("content")
            parts = (
                [content]
                if isinstance(content, str)
                else [as_object(one).get("text") for one in _as_list(content)]
            )
            if role in _ROLES:
                text = "".join(part for part in parts if isinstance(part, str))
                messages.append(Message(_ROLES[str(role)], text))
        return _prompt(tuple(messages) or (Message("user", ""),), "", columns=values)

    def _pair(self, values: Mapping[str, object]) -> Prompt:
        source = self._source
        chosen = _value(values, "chosen_key", source.chosen_key)
        rejected = _value(values, "rejected_key", source.rejected_key)
        if len(_as_list(chosen)) <= 1 or not _as_list(rejected):
            context = self._context(_value(values, "prompt_key", source.prompt_key), source.prompt_key)
            better = self._answer(chosen, source.chosen_key)
            return _pair_of(context, better, self._answer(rejected, source.rejected_key), own_turn=False)
        better = self._messages(chosen, source.chosen_key)
        worse = self._messages(rejected, source.rejected_key)
        if better[:-1] != worse[:-1]:
            raise RowError("the two conversations differ before their last message")
        if {better[-1].role, worse[-1].role} != {_ASSISTANT}:
            raise RowError("a conversation does not end with an assistant's answer")
        return _pair_of(better[:-1], better[-1], worse[-1], own_turn=True)

    def _ranked(self, asked: object, better: object, worse: object, tied: bool) -> Prompt | None:
        if tied and self._kind is RowKind.PAIRS and self._source.ties == "drop":
            return None
        context, chosen = self._context(asked, "context"), self._answer(better, "the better answer")
        if self._kind is not RowKind.PAIRS:
            return _prompt(context, chosen.content, extras=Extras(answer=_beyond_text(chosen)))
        return _pair_of(context, chosen, self._answer(worse, "the worse answer"), own_turn=False)

    def _context(self, given: object, key: str) -> Context:
        if isinstance(given, list):
            return self._messages(cast("object", given), key)
        if not isinstance(given, str) or not given:
            raise RowError(f"{key} is {_shown(given)}, and must be text")
        return given

    def _messages(self, given: object, key: str) -> tuple[Message, ...]:
        if not self._chat:
            raise RowError(f"{key} is a conversation, {_NEEDS_TEMPLATE}")
        if not _as_list(given):
            raise RowError(f"{key} is {_shown(given)}, and must be a list of messages")
        turns = tuple(_message(message, key, place) for place, message in enumerate(_as_list(given)))
        if turns[0].role == _ASSISTANT:
            raise RowError(f"{key} begins with an assistant's message, which answers nothing")
        return turns

    def _answer(self, given: object, key: str) -> Message:
        """Return an answer: text, a number, or a message of the assistant alone."""
        if len(messages := _as_list(given)) == 1:
            message = _message(messages[0], key, 0)
            if message.role == _ASSISTANT:
                if not self._chat and _beyond_text(message):
                    raise RowError(f"{key} is {_shown(given)}, {_NEEDS_TEMPLATE}")
                return message
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise RowError(f"{key} is {_shown(given)}, and must be text or a number")
        return Message(_ASSISTANT, str(given))


def _ranked_answers(row: Mapping[str, object]) -> tuple[object, object, object, bool] | None:
    """Return the prompt, the better answer, the worse one, and whether neither is; None for rows without ranks."""
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        first, second, preference = (row[key] for key in ("response1", "response2", "overall_preference"))
        if not isinstance(preference, int | float):
            raise RowError(f"overall_preference is {preference!r:.40}, and must be a number")
        tied = preference == 0
        better, worse = (second, first) if preference > 0 else (first, first if tied else second)
        return row["context"], better, worse, tied
    if not {"context", "completions"} <= row.keys():
        return None
    given = [as_object(one) for one in _as_list(row["completions"])]
    if len(given) != 2 or not all(
        "completion" in one and isinstance(one.get("rank"), int | float) for one in given
    ):
        raise RowError(
            "completions are not two of a rank, which is a number, and a completion", code="completions"
        )
    first, second = sorted(given, key=lambda one: one["rank"])
    return row["context"], first["completion"], second["completion"], first["rank"] == second["rank"]


def _prompt(context: Context, answer: str, **more: Any) -> Prompt:
    text, messages = (context, ()) if isinstance(context, str) else ("", context)
    return Prompt(0, text, answer, context=messages, **more)


def _pair_of(context: Context, better: Message, worse: Message, *, own_turn: bool) -> Prompt:
    if not (better.trained and worse.trained):
        raise RowError("an answer of the pair has weight 0, and there is nothing else to train on")
    extras = Extras((), _beyond_text(better), _beyond_text(worse), own_turn)
    return _prompt(context, better.content, rejected=worse.content, extras=extras)


def _beyond_text(message: Message) -> Message | None:
    """Return an answer that is more than its text."""
    plain = message == Message(message.role, message.content) and message.trained
    return None if plain else message


def _filled(value: object) -> object:
    """Return a JSON value without the keys of objects that are null."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: _filled(held) for key, held in items if held is not None}
    return [_filled(held) for held in cast("list[object]", value)] if isinstance(value, list) else value


def _value(values: Mapping[str, object], setting: str, key: str) -> object:
    """Return the value of a column; dots lead into columns that hold others."""
    if key in values:
        return values[key]
    inner: object = values
    for part in key.split("."):
        there = as_object(inner)
        if part not in there:
            has = shortened(", ".join(map(repr, there or values)), 200) or "none"
            raise ColumnError(setting, f"no key {key!r}; it has {has}")
        inner = there[part]
    return inner


def _as_list(value: object) -> Sequence[object]:
    """Return a list as it is, and an empty one for all else, which holds no elements here."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def _message(given: object, key: str, place: int) -> Message:
    try:
        return read_row_message(given, f"{key}[{place}]")
    except MessageError as error:
        what = f"{key} holds {_shown(given)}, which is no message: {error}"
        raise RowError(what, code=code_of(error)) from error


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
