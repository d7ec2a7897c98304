"""Rows of Python as a source of a recipe: those in memory become a file of the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config.base import Code, ConfigError, Problem, Tree, join_path
from nemo_rl_mcore.driver.run_folder import replacing

PROMPT_NAMES = ("input", "prompt", "question", "problem", "query", "instruction")
ANSWER_NAMES = ("output", "answer", "solution", "completion", "response", "expected_answer", "ground_truth")
"""Columns that are taken for the prompt and its answer where they are there, the first ones before others."""
_CONVERSATIONS = ("messages", "chosen")


type Data = str | Path | Mapping[str, object] | Iterable[Mapping[str, object]]
"""A file, a folder or a name on the hub; a section like `data.train` of a recipe; or rows: a list, a `Dataset`."""


@dataclass(frozen=True)
class Source:
    """The section of a source; columns: those that reward functions can take, None where only its reader sees them."""

    section: Tree
    columns: Collection[str] | None = None
    is_chat: bool = False


def source_of(given: Data, file: Path, wanted: Collection[str] = ()) -> Source:
    """Return what a recipe has of a source.

    Rows in memory are written to a file of this name, in a folder of their own beside it. Columns are named by what the
    first row has; wanted: columns that reward functions take, of which those that are there are kept. Raises
    ConfigError for no rows, and rows without a prompt.
    """
    argument = file.stem
    if isinstance(given, Mapping):
        section = dict(cast("Mapping[str, object]", given))
        if splits := [name for name, one in section.items() if hasattr(one, "column_names")]:
            what = f"a {type(cast('object', given)).__name__} of {', '.join(splits)}, and a source is one of these"
            raise _refused("wrong-kind", argument, "", what, f"give one: {argument}=...[{splits[0]!r}]")
        return Source(section, cast("Sequence[str]", section.get("columns", ())))
    if isinstance(given, str | Path):
        path = Path(given)
        first = _first_of_file(path)
        place = str(path.absolute()) if path.exists() else str(given)
    else:
        is_frame = hasattr(given, "iterrows")  # of pandas, which yields the names of its columns
        rows = cast("Any", given).to_dict("records") if is_frame else [*given]
        if not rows:
            raise _refused("too-few-rows", argument, "", "no rows", "give at least one")
        first = rows[0]
        place = str(_written(rows, file))
    section: Tree = {"data_path": place}
    if first is None:
        return Source(section)
    return Source(section | _columns(first, wanted, argument), [*first], _is_chat(first))


def _refused(code: Code, argument: str, key: str, what: str, remedy: str) -> ConfigError:
    path = join_path(f"data.{argument}", key)
    return ConfigError([Problem(code, path, what, remedy, where=f"argument {argument}")])


def _first_of_file(path: Path) -> Mapping[str, object] | None:
    """Return the first row of a JSONL file; None for other formats, whose columns are given or named as usual."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        line = next((line for line in file if line.strip()), "{}")
    try:
        row = json.loads(line)
    except ValueError:
        return None  # the reader says what is wrong with it
    return cast("Mapping[str, object]", row) if isinstance(row, dict) else None


def _written(rows: Sequence[Mapping[str, object]], file: Path) -> Path:
    """Write rows into a folder of their digest, so that those of an earlier run stay; return the file."""
    lines: list[bytes] = []
    for number, row in enumerate(rows, start=1):
        try:
            line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            what = f"row {number} cannot be written as JSON: {error}"
            raise _refused("wrong-row", file.stem, "", what, "give text, numbers and lists") from error
        lines.append(f"{line}\n".encode())
    digest = sha256(b"".join(lines)).hexdigest()[:12]
    place = file.absolute().with_name(digest) / file.name
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as written:
            written.writelines(lines)
    return place


def _columns(first: Mapping[str, object], wanted: Collection[str], argument: str) -> Tree:
    """Return the keys that name the columns of a row, as far as their names are others than those of the recipe."""
    found: Tree = {}
    if kept := [name for name in wanted if name in first]:
        found["columns"] = kept
    if "messages" in first or "chosen" in first:
        return found
    prompt = next((name for name in PROMPT_NAMES if name in first), None)
    if prompt is None:
        there = ", ".join(map(repr, first)) or "none"
        what = f"no column is the prompt; it has {there}"
        remedy = f"call it {PROMPT_NAMES[1]}, or name it: {argument}={{'data_path': ..., 'input_key': ...}}"
        if "text" in first:
            what = f"{what}; whole texts, as of a column `text`, are not trained on"
            remedy = f"part each into prompt and completion, or into messages; or {remedy}"
        raise _refused("missing", argument, "input_key", what, remedy)
    answer = next((name for name in ANSWER_NAMES if name in first), None)
    return found | {"input_key": prompt, "output_key": answer}


def _is_chat(first: Mapping[str, object]) -> bool:
    prompts = (first[name] for name in (*PROMPT_NAMES, *_CONVERSATIONS) if name in first)
    return any(isinstance(prompt, list) for prompt in islice(prompts, 1))
