"""Rows of a source as they lie there, and each of them as a prompt with its answers.

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
from dataclasses import KW_ONLY, dataclass, replace
from glob import glob
from logging import CRITICAL
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config.base import Code, ConfigError, Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import is_hub_id
from nemo_rl_mcore.data.messages import Context, Message, MessageError, Tools, as_object, read_row_message
from nemo_rl_mcore.data.strict_json import MAY_BE_TORN, parse_json, read_json, read_regular, torn_text
from nemo_rl_mcore.errors import RefusedError, code_of, quoted, shortened

GYM_COLUMN = "responses_create_params"
"""The column of a row of NeMo Gym's that has the first call of its agent."""
_LIBRARY_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""The library's names of the formats that it reads, by the end of a file's name."""
_OF_PARTS, _OF_A_PART = "dataset_dict.json", "state.json"
_BUFFER = 10_000
"""Rows of a stream that the next one is drawn from."""
_PLACE = "__place__"
"""The column that keeps a row's place in the stream through the shuffle."""
_TORN = "half a surrogate pair, which is no character, in"
_ASSISTANT = "assistant"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": _ASSISTANT}
_NEEDS_TEMPLATE = "which needs data.apply_chat_template: true"


@dataclass(frozen=True)
class Row:
    """A row and its place; `wrong` says what keeps it from being one. of_lines: each row has columns of its own."""

    place: str
    values: Mapping[str, object]
    wrong: str = ""
    of_lines: bool = True


def is_fetched(source: SourceConfig) -> bool:
    """Return whether the rows are those of a data set of the hub: a name without a file or folder of that name."""
    return any(map(_is_hub_name, source.paths))


def _is_hub_name(path: str) -> bool:
    known = Path(path).suffix in (*_LIBRARY_FORMATS, ".json", ".jsonl")
    return is_hub_id(path) and not known and not Path(path).exists()


def refused(code: Code, key: str, what: str, remedy: str = "") -> ConfigError:
    """Return the error of one problem, whose path is below the source."""
    return ConfigError([Problem(code, key, what, remedy)])


def read_rows(source: SourceConfig) -> Sequence[Row]:
    """Return all rows of a source; raises ConfigError with the path of its key below the source."""
    [first, *others] = source.paths
    rows = list[Row]()
    try:
        if _is_hub_name(first) or Path(first).is_dir():
            if others:
                what = f"{first!r} is no file, and not alone"
                raise refused("wrong-kind", "data_path", what, "name files, or one folder")
            return _read_data_set(first, source.subset, source.split or "train")
        if source.subset is not None:
            what = f"{source.subset!r} does not go with files"
            raise refused("incompatible", "subset", what, "remove it")
        for path in source.paths:
            found = sorted(glob(path)) if "*" in path else [path]
            if not found:
                what = f"no file matches {path!r} in {Path.cwd()}"
                raise refused("not-found", "data_path", what, "correct the pattern")
            rows += [row for file in found for row in _read_file(file)]
    except MemoryError as error:
        what = f"{', '.join(map(repr, source.paths))}: more rows than this machine has memory for"
        remedy = "set streaming: true, name a part of them, or a larger machine"
        raise refused("too-large", "data_path", what, remedy) from error
    if source.split in (None, "train"):
        return rows
    ranges = _named_ranges(source.split, {"train": len(rows)})
    return [row for _, start, end in ranges for row in rows[start:end]]


def _read_file(path: str) -> Sequence[Row]:
    suffix, here = Path(path).suffix, f"{path!r} cannot be read from {Path.cwd()}"
    if suffix in _LIBRARY_FORMATS:
        if not Path(path).is_file():
            raise refused("not-found", "data_path", f"{here}: no such file", "correct the path")
        found = _loaded(path, format=_LIBRARY_FORMATS[suffix], data_files=path, split="train")
        return _library_rows(found, path)
    try:
        content = read_regular(Path(path)).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        remedy = "name files, a folder or a data set of the hub"
        raise refused("not-readable", "data_path", f"{here}: {error.strerror}", remedy) from error
    if suffix == ".json" and content.lstrip()[:1] == b"[":
        try:
            values = cast("list[object]", parse_json(content))
        except ValueError as error:
            raise refused(
                "not-readable", "data_path", f"{path!r} is not JSON: {error}", "correct it"
            ) from error
        torn = bool(MAY_BE_TORN.search(content))
        rows = [
            _row_of(f"{path}, row {number}", value, torn=torn) for number, value in enumerate(values, start=1)
        ]
    else:
        rows = [*_rows_of_lines(path, content.splitlines())]
    if not rows:
        what = f"{path!r} holds no row"
        raise refused("too-few-rows", "data_path", what, "name a file with an object a line")
    return rows


def _rows_of_lines(path: str, lines: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of JSONL, each with its file:line; what is wrong with a line is in its row."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                yield _row_of(place, parse_json(line), torn=bool(MAY_BE_TORN.search(line)))
            except ValueError as error:
                yield Row(place, {}, f"not JSON: {error}")


def _row_of(place: str, value: object, *, torn: bool) -> Row:
    if torn and (text := torn_text(value)):
        return Row(place, {}, f"{_TORN} {text}")
    if isinstance(value, dict):
        return Row(place, cast("dict[str, object]", value))
    return Row(place, {}, f"not an object but {type(value).__name__}")


def _read_data_set(path: str, subset: str | None, split: str) -> Sequence[Row]:
    import datasets

    if _is_saved(Path(path)):
        _require_inside(Path(path))
        with _telling(path):
            whole = datasets.load_from_disk(path)
        parts = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": whole}
        ranges = _named_ranges(split, {str(name): len(part) for name, part in parts.items()})
        chosen = [parts[name].select(range(start, end)) for name, start, end in ranges]
        found = datasets.concatenate_datasets(chosen) if chosen else ()
    else:
        found = _loaded(path, subset=subset, split=split)
    rows = _library_rows(found, f"{path}, {split}")
    if not rows:
        raise refused("too-few-rows", "split", f"{split!r} of {path!r} holds no row", "name another one")
    return rows


def _library_rows(found: Any, place: str) -> list[Row]:
    return [
        Row(f"{place}, row {number}", values, of_lines=False) for number, values in enumerate(found, start=1)
    ]


def read_stream(source: SourceConfig, seed: int | None) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a source, each with its place in it, without a copy of them; ConfigError as `read_rows`.

    seed: of the order, in which each row is drawn from those that a buffer holds; None for the order in which they lie.
    """
    import datasets

    path, split = source.paths[0], source.split or "train"
    files = [file for one in source.paths for file in sorted(glob(one)) or [one]]
    suffix = Path(files[0]).suffix
    rows: Any
    if not (Path(path).is_file() or "*" in path or len(source.paths) > 1):
        if _is_saved(Path(path)):
            what = f"{path!r} was saved by save_to_disk"
            raise refused("incompatible", "streaming", what, "set it to false")
        rows = _loaded(path, subset=source.subset, split=split, streaming=True)
    elif suffix != ".jsonl" or split != "train":
        name = _LIBRARY_FORMATS.get(suffix, "json")
        rows = _loaded(path, format=name, data_files=files, split=split, streaming=True)
    else:
        with _telling(path):  # the library would guess a type for each column
            rows = datasets.IterableDataset.from_generator(_objects, gen_kwargs={"files": files})

    def placed(row: dict[str, object], place: int) -> dict[str, object]:
        return {**row, _PLACE: place}

    rows = rows.map(placed, with_indices=True)
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
            raise refused("wrong-row", "data_path", what, "mend it") from error
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
    """Refuse files of save_to_disk that name others than those of their folder."""
    files = [(folder / _OF_A_PART, "_data_files")]
    if (folder / _OF_PARTS).is_file():
        files = [(folder / _OF_PARTS, "splits")]
    for file, key in files:
        try:
            found = as_object(read_json(file)).get(key)
            if not isinstance(found, list):
                raise ValueError(f"{key} is {quoted(found)}, and no list")
            for entry in cast("list[object]", found):
                name = as_object(entry).get("filename") if key == "_data_files" else entry
                if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"it names {quoted(name)}, which is no file of its folder")
                if key == "splits":  # its files are looked at after those that stand here
                    files.append((folder / name / _OF_A_PART, "_data_files"))
        except (OSError, ValueError) as error:
            what = f"{str(file)!r} cannot be read: {error}"
            raise refused(
                "not-readable", "data_path", what, "name a folder as save_to_disk writes it"
            ) from error


def _loaded(path: str, *, format: str = "", subset: str | None = None, **options: Any) -> Any:
    """Return what `datasets.load_dataset` does; format: of files."""
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
    """Tell by a ConfigError why the library does not load something; it raises classes of five other libraries."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(CRITICAL)  # it logs what it raises too
    try:
        yield
    except Exception as error:
        cause = (isinstance(error, DatasetGenerationError) and error.__cause__) or error
        text = " ".join(str(cause).split())
        signs = {
            "split": ("unknown split", "split name"),
            "subset": ("builderconfig", "config name is missing"),
        }
        for key, said in signs.items():
            if any(sign in text.lower() for sign in said):
                what = f"{path!r}: {shortened(text, 300)}"
                raise refused("not-found", key, what, "name one of those") from error
        what = f"{path!r} cannot be read ({type(cause).__name__}: {shortened(text, 200)})"
        remedy = "name files, a folder, or a data set of the hub; fetch that where there is a network"
        raise refused("not-readable", "data_path", what, remedy) from error


def _named_ranges(split: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return the part, the first row and the end of each of `split`, such as test[10:20]+train[:90%]."""
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        what = f"{split!r} is not there: {' '.join(str(error).split())}"
        remedy = f"known: {', '.join(sizes)}, and parts such as {next(iter(sizes))}[:90%]"
        raise refused("not-found", "split", what, remedy) from error
    return [(part.splitname, part.from_ or 0, part.to or 0) for part in parts]


def read_prompts(path: Path, input_key: str | None = None) -> list[Prompt]:
    """Return the prompts of a file: a text with a prompt a line, or JSONL with a prompt or messages a line.

    In order, without empty lines. input_key: of the text or the messages, before the keys `prompt` and `messages`.
    Raises RefusedError, naming file and line.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        code = "unreadable-file" if isinstance(error, OSError) else "no-text"
        raise RefusedError(f"{str(path)!r} cannot be read as text: {error}", code=code) from error
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
            key = next((key for key in keys if key in as_object(row)), None)
            if key is None:
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


class RowError(RefusedError):
    """What is wrong with a row; setting: the key of the source that names a column which is not there."""

    setting = ""


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of a source for an algorithm; `chat` allows conversations."""

    source: SourceConfig
    kind: RowKind
    _: KW_ONLY
    chat: bool

    def read(self, row: Row) -> Prompt | None:
        """Return a row before it gets its texts and its index; None for a pair without a better answer.

        Each form of rows has columns for what is asked, the answer and, of pairs, the worse answer: NeMo RL's
        completions with ranks and HelpSteer3's preferences, pairs, conversations, and prompts with answers.
        Raises RowError.
        """
        if row.wrong:
            raise RowError(row.wrong)
        source, kind, values = self.source, self.kind, row.values
        if not row.of_lines:  # a library fills in nulls for fields that a message or tool has not
            keys = {source.chat_key, source.input_key, source.prompt_key, source.chosen_key}
            keys |= {source.rejected_key, source.tool_key or ""}
            keys |= {"context", "completions", "response1", "response2"}
            values = {key: _filled(value) if key in keys else value for key, value in values.items()}
        ranked = _ranked_answers(values)
        if GYM_COLUMN in values and source.input_key not in values and ranked is None:
            return Prompt(0, "", "", context=self._asked_of_gym(values), columns=values, place=row.place)
        worse, own_turn, columns, scored = None, False, dict[str, object](), dict[str, Any]()
        if ranked is not None and source.prompt_key not in values:
            asked, better, other, tied = ranked
            if tied and kind is RowKind.PAIRS and source.ties == "drop":
                return None
            context, answer = self._context(asked, "context"), self._answer(better, "the better answer")
            if kind is RowKind.PAIRS:
                worse = self._answer(other, "the worse answer")
        elif kind is RowKind.PAIRS:
            context, answer, worse, own_turn = self._pair(values)
        else:
            context, answer, own_turn = self._answered(values)
            scored = self._scored(values, answer.content)
            columns = {name: _value(row.values, "columns", name) for name in source.columns}
        if worse is not None and not (answer.trained and worse.trained):
            raise RowError("an answer of the pair has weight 0, and there is nothing else to train on")
        read = Prompt(
            0,
            context if isinstance(context, str) else "",
            answer.content,
            None if worse is None else worse.content,
            () if isinstance(context, str) else tuple(context),
            own_turn and kind is RowKind.ANSWERS,
            place=row.place,
            columns=columns,
            tools=self._tools(values),
            answer_message=_beyond_text(answer),
            rejected_message=None if worse is None else _beyond_text(worse),
            own_turn=own_turn,
        )
        return replace(read, **scored)

    def _pair(self, values: Mapping[str, object]) -> tuple[Context, Message, Message, bool]:
        """Return what is asked, both answers, and whether they are turns of their own."""
        source = self.source
        chosen = _value(values, "chosen_key", source.chosen_key)
        rejected = _value(values, "rejected_key", source.rejected_key)
        if len(_as_list(chosen)) <= 1 or not _as_list(rejected):
            context = self._context(_value(values, "prompt_key", source.prompt_key), source.prompt_key)
            better = self._answer(chosen, source.chosen_key)
            return context, better, self._answer(rejected, source.rejected_key), False
        *context, better = self._messages(chosen, source.chosen_key)
        *others, worse = self._messages(rejected, source.rejected_key)
        if context != others:
            raise RowError("the two conversations differ before their last message")
        if {better.role, worse.role} != {_ASSISTANT}:
            raise RowError("a conversation does not end with an assistant's answer")
        return context, better, worse, True

    def _answered(self, values: Mapping[str, object]) -> tuple[Context, Message, bool]:
        """Return what is asked, the answer, and whether that is the end of a conversation."""
        source, answer = self.source, Message(_ASSISTANT, "")
        # A library that knows columns has a null where a row of this one has none.
        if self.kind is RowKind.ANSWERS and (
            values.get(source.chat_key) is not None
            or (source.chat_key in values and values.get(source.input_key) is None)
        ):
            *context, answer = self._messages(values[source.chat_key], source.chat_key)
            if not context or answer.role != _ASSISTANT:
                raise RowError(f"{source.chat_key} does not end with an assistant's answer to a message")
            return context, answer, True
        context = self._context(_value(values, "input_key", source.input_key), source.input_key)
        if source.output_key is not None:
            answer = self._answer(_value(values, "output_key", source.output_key), source.output_key)
        return context, answer, False

    def _scored(self, values: Mapping[str, object], imitated: str) -> dict[str, Any]:
        """Return the answer that is scored beside what is imitated, or why the row does not state it."""
        if (how := self.source.answer) is None:
            return {}
        text = imitated
        if how.key is not None:
            text = self._answer(_value(values, "answer.key", how.key), how.key).content
        found = how.extract(text) if how.in_text else text.strip() or None
        if found is None:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
            lacking = how.lacking if how.in_text else "is empty"
            return {"unscored": f"the answer {shown!r} {lacking}"}
        return {"answer": found, "solution": imitated if self.kind is RowKind.ANSWERS else None}

    def _tools(self, values: Mapping[str, object]) -> Tools:
        """Return the functions that answers of a row may call: a list, or its JSON as text."""
        key = self.source.tool_key
        given = None if key is None or not self.chat else values.get(key)
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

    def _asked_of_gym(self, values: Mapping[str, object]) -> tuple[Message, ...]:
        """Return what an agent of NeMo Gym's begins with, as far as the row has it.

        Of the items of OpenAI's Responses API that are the texts of messages; calls of tools and the like are left out.
        """
        if not self.chat:
            raise RowError(f"{GYM_COLUMN} is a conversation, {_NEEDS_TEMPLATE}")
        asked = as_object(values[GYM_COLUMN]).get("input")
        messages = list[Message]()
        for item in [{"role": "user", "content": asked}] if isinstance(asked, str) else _as_list(asked):
            role, content = as_object(item).get("role"), as_object(item).get("content")
            parts = [{"text": content}] if isinstance(content, str) else _as_list(content)
            texts = [text for one in parts if isinstance(text := as_object(one).get("text"), str)]
            if role in _ROLES:
                messages.append(Message(_ROLES[str(role)], "".join(texts)))
        return tuple(messages) or (Message("user", ""),)

    def _context(self, given: object, key: str) -> Context:
        if isinstance(given, list):
            return self._messages(cast("object", given), key)
        if not isinstance(given, str) or not given:
            raise RowError(f"{key} is {_shown(given)}, and must be text")
        return given

    def _messages(self, given: object, key: str) -> tuple[Message, ...]:
        if not self.chat:
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
                if not self.chat and _beyond_text(message):
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
        what = "completions are not two of a rank, which is a number, and a completion"
        raise RowError(what, code="completions")
    first, second = sorted(given, key=lambda one: one["rank"])
    return row["context"], first["completion"], second["completion"], first["rank"] == second["rank"]


def _beyond_text(message: Message) -> Message | None:
    plain = message == Message(message.role, message.content) and message.trained
    return None if plain else message


def _filled(value: object) -> object:
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
            error = RowError(f"no key {key!r}; it has {has}")
            error.setting = setting
            raise error
        inner = there[part]
    return inner


def _as_list(value: object) -> Sequence[object]:
    return cast("list[object]", value) if isinstance(value, list) else ()


def _message(given: object, key: str, place: int) -> Message:
    try:
        return read_row_message(given, f"{key}[{place}]")
    except MessageError as error:
        what = f"{key} holds {_shown(given)}, which is no message: {error}"
        raise RowError(what, code=code_of(error)) from error


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
