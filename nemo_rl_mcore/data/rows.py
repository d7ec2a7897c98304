"""Read a source's rows, and turn each into a prompt with its answers.

JSON and JSONL are parsed here; `datasets`, imported on use, reads all other formats. It never runs a data set's code:
release 4 removed trust_remote_code.
"""

# The datasets library is mostly untyped.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from glob import glob
from logging import CRITICAL
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config.base import refused
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import is_hub_id
from nemo_rl_mcore.data.messages import Context, Message, MessageError, Tools, as_object, read_row_message
from nemo_rl_mcore.data.strict_json import MAY_BE_TORN, parse_json, read_json, read_regular, torn_text
from nemo_rl_mcore.errors import RefusedError, code_of, quoted, shortened

GYM_COLUMN = "responses_create_params"
"""The column that holds an agent's first call in NeMo Gym's rows."""
_LIBRARY_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_OF_A_PART = "state.json"
TORN = "half a surrogate pair, which is not a character, in"
_ASSISTANT = "assistant"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": _ASSISTANT}
_NEEDS_TEMPLATE = "which needs data.apply_chat_template: true"


@dataclass(frozen=True)
class Row:
    """A row of a file. wrong: the reason if it is unreadable. of_lines: each row has its own columns."""

    place: str
    values: Mapping[str, object]
    wrong: str = ""
    of_lines: bool = True


def is_fetched(*paths: str) -> bool:
    """Return true if a path is a hub data set's name, not a local file or folder."""
    known = (*_LIBRARY_FORMATS, ".json", ".jsonl")
    names = [path for path in paths if is_hub_id(path) and Path(path).suffix not in known]
    return any(not Path(name).exists() for name in names)


def read_rows(source: SourceConfig) -> Sequence[Row]:
    """Return a source's rows; raises ConfigError with paths relative to the source."""
    [first, *others] = source.paths
    rows, split = list[Row](), source.split or "train"
    try:
        if is_fetched(first) or Path(first).is_dir():
            if others:
                what = f"{first!r} is not a file and cannot be combined with others"
                raise refused("wrong-kind", "data_path", what, "name files, or one folder")
            rows = _library_rows(_data_set(first, source.subset, split), f"{first}, {split}")
            if not rows:
                what = f"{split!r} of {first!r} holds no row"
                raise refused("too-few-rows", "split", what, "name another one")
            return rows
        if source.subset is not None:
            what = f"{source.subset!r} cannot be combined with files"
            raise refused("incompatible", "subset", what, "remove it")
        for path in source.paths:
            found = sorted(glob(path)) if "*" in path else [path]
            if not found:
                what = f"no file matches {path!r} in {Path.cwd()}"
                raise refused("not-found", "data_path", what, "correct the pattern")
            rows += [row for file in found for row in _read_file(file)]
    except MemoryError as error:
        what = f"{', '.join(map(repr, source.paths))}: more rows than this machine has memory for"
        remedy = "name a part of them, or a larger machine"
        raise refused("too-large", "data_path", what, remedy) from error
    if split == "train":
        return rows
    return [row for _, start, end in _ranges(split, {"train": len(rows)}) for row in rows[start:end]]


def _read_file(path: str) -> Sequence[Row]:
    suffix, here = Path(path).suffix, f"{path!r} cannot be read from {Path.cwd()}"
    if suffix in _LIBRARY_FORMATS:
        if not Path(path).is_file():
            raise refused("not-found", "data_path", f"{here}: no such file", "correct the path")
        return _library_rows(_loaded(path, split="train"), path)
    try:
        content = read_regular(Path(path)).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        remedy = "name files, a folder or a data set of the hub"
        raise refused("not-readable", "data_path", f"{here}: {error.strerror}", remedy) from error
    if suffix == ".json" and content.lstrip()[:1] == b"[":
        try:
            values = cast("list[object]", parse_json(content))
        except ValueError as error:
            what = f"{path!r} is not JSON: {error}"
            raise refused("not-readable", "data_path", what, "correct it") from error
        torn, numbered = bool(MAY_BE_TORN.search(content)), enumerate(values, start=1)
        rows = [_row_of(f"{path}, row {number}", value, torn=torn) for number, value in numbered]
    else:
        rows = list[Row]()
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                place, torn = f"{path}:{number}", bool(MAY_BE_TORN.search(line))
                try:
                    rows.append(_row_of(place, parse_json(line), torn=torn))
                except ValueError as error:
                    rows.append(Row(place, {}, f"not JSON: {error}"))
    if not rows:
        what = f"{path!r} holds no row"
        raise refused("too-few-rows", "data_path", what, "name a file with an object a line")
    return rows


def _row_of(place: str, value: object, *, torn: bool) -> Row:
    if torn and (text := torn_text(value)):
        return Row(place, {}, f"{TORN} {text}")
    if isinstance(value, dict):
        return Row(place, cast("dict[str, object]", value))
    return Row(place, {}, f"not an object but {type(value).__name__}")


def _library_rows(found: Any, place: str) -> list[Row]:
    return [Row(f"{place}, row {row}", values, of_lines=False) for row, values in enumerate(found, start=1)]


def _data_set(path: str, subset: str | None, split: str) -> Any:
    """Return the rows of a local folder or a hub data set; a save_to_disk folder may not refer to files outside it."""
    folder = Path(path)
    saved = [(folder / "dataset_dict.json", "splits"), (folder / _OF_A_PART, "_data_files")]
    files = [(file, key) for file, key in saved if file.is_file()][:1]
    if not files:
        return _loaded(path, subset, split=split)
    for file, key in files:
        try:
            found = as_object(read_json(file)).get(key)
            if not isinstance(found, list):
                raise ValueError(f"{key} is {quoted(found)}, and no list")
            for entry in cast("list[object]", found):
                name = as_object(entry).get("filename") if key == "_data_files" else entry
                if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"it names {quoted(name)}, which is not a file of its folder")
                if key == "splits":  # and the loop goes on to that split's files
                    files.append((folder / name / _OF_A_PART, "_data_files"))
        except (OSError, ValueError) as error:
            what, remedy = f"{str(file)!r} cannot be read: {error}", "name a folder as save_to_disk writes it"
            raise refused("not-readable", "data_path", what, remedy) from error
    import datasets

    whole = _loaded(path, saved=True)
    parts = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": whole}
    ranges = _ranges(split, {str(name): len(part) for name, part in parts.items()})
    chosen = [parts[name].select(range(start, end)) for name, start, end in ranges]
    return datasets.concatenate_datasets(chosen) if chosen else ()


def _loaded(path: str, subset: str | None = None, *, saved: bool = False, **options: Any) -> Any:
    """Load a file by its suffix, a folder written by save_to_disk, or any other path; raises ConfigError."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(CRITICAL)  # it both logs and raises its errors
    format = path
    try:
        if saved:
            return datasets.load_from_disk(path)
        if Path(path).is_file():
            format, options["data_files"] = _LIBRARY_FORMATS[Path(path).suffix], [path]
        if format == "csv":
            # Cells are read as text; otherwise 007 becomes 7, 72 next to 1.5 becomes 72.0, and "None" becomes null.
            import pandas

            columns = pandas.read_csv(path, nrows=0).columns
            features = datasets.Features({str(column): datasets.Value("string") for column in columns})
            options.update(features=features, keep_default_na=False)
        return datasets.load_dataset(format, subset, **options)
    except Exception as error:
        cause = (isinstance(error, DatasetGenerationError) and error.__cause__) or error
        text = " ".join(str(cause).split())
        what = f"{path!r}: {shortened(text, 300)}"
        if any(sign in text.lower() for sign in ("unknown split", "split name")):
            raise refused("not-found", "split", what, "name one of those") from error
        if any(sign in text.lower() for sign in ("builderconfig", "config name is missing")):
            raise refused("not-found", "subset", what, "name one of those") from error
        what = f"{path!r} cannot be read ({type(cause).__name__}: {shortened(text, 200)})"
        remedy = "name files, a folder, or a data set of the hub; fetch that where there is a network"
        raise refused("not-readable", "data_path", what, remedy) from error


def _ranges(split: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return (name, start, end) for each part of a split such as test[10:20]+train[:90%]."""
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        what = f"{split!r} is not there: {' '.join(str(error).split())}"
        remedy = f"known: {', '.join(sizes)}, and parts such as {next(iter(sizes))}[:90%]"
        raise refused("not-found", "split", what, remedy) from error
    return [(part.splitname, part.from_ or 0, part.to or 0) for part in parts]


class RowError(RefusedError):
    """An unreadable row. setting: the source's setting that names a missing column."""

    setting = ""


@dataclass(frozen=True)
class RowReader:
    """Reads a source's rows for an algorithm. chat: conversations are allowed."""

    source: SourceConfig
    kind: RowKind
    _: KW_ONLY
    chat: bool

    def read(self, row: Row) -> Prompt | None:
        """Return a row as a prompt with index 0, or None for a tied pair that is dropped. Raises RowError.

        Formats: NeMo RL's ranked completions, HelpSteer3's preferences, pairs, conversations, prompts with answers, and
        NeMo Gym's rows.
        """
        if row.wrong:
            raise RowError(row.wrong)
        source, kind, values = self.source, self.kind, row.values
        if not row.of_lines:  # the library fills fields that messages and tools lack with nulls
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
            worse = self._answer(other, "the worse answer") if kind is RowKind.PAIRS else None
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
        """Return the question, the better and the worse answer, and true if the answers are separate messages."""
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
        """Return the question, the answer, and true if the answer is a conversation's last message."""
        source, answer = self.source, Message(_ASSISTANT, "")
        # Rows from the library hold null for a missing column; JSON rows omit the key.
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
        """Return the prompt's fields for the reference answer, or the reason if there is none."""
        if (how := self.source.answer) is None:
            return {}
        if isinstance(how, str):
            text = self._answer(_value(values, "answer", how), how).content
            found, lacking = text.strip() or None, "is empty"
        else:
            text = imitated
            found, lacking = how.extract(text), how.lacking
        if found is None:
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else f"...{shown[-57:]}"
            return {"unscored": f"the answer {shown!r} {lacking}"}
        return {"answer": found, "solution": imitated if self.kind is RowKind.ANSWERS else None}

    def _tools(self, values: Mapping[str, object]) -> Tools:
        """Return the functions that the row's answers may call, from a list or JSON text."""
        key = self.source.tool_key
        given = None if key is None or not self.chat else values.get(key)
        if isinstance(given, str) and given:
            with suppress(ValueError):
                given = parse_json(given)
        if not given:
            return ()
        if not _as_list(given) or not all(isinstance(one, dict) for one in _as_list(given)):
            remedy = "set tool_key to another column, or to null"
            raise RowError(f"{key} is {_shown(values[str(key)])}, and must be a list of functions; {remedy}")
        return cast("Tools", given)

    def _asked_of_gym(self, values: Mapping[str, object]) -> tuple[Message, ...]:
        """Return the messages of a Responses API input, without other items, such as calls."""
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
        """Return an answer that is a text, a number or a single assistant message."""
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
    """Return the question, the better and the worse answer, and true for a tie; None for a row without ranks."""
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
    """Return a column's value; dots in the key select nested columns."""
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
        what = f"{key} holds {_shown(given)}, which is not a message: {error}"
        raise RowError(what, code=code_of(error)) from error


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
