"""A row as it lies in its source, and what keeps a source from being read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from nemo_rl_mcore.config.base import Code, Problem
from nemo_rl_mcore.data.strict_json import may_be_torn, parse_json, torn_text


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


def rows_of_lines(path: str, lines: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of JSONL, each with its file:line; what is wrong with a line is in its row."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            yield row_of(place, parse_json(line), torn=may_be_torn(line))
        except ValueError as error:
            yield Row(place, {}, f"not JSON: {error}")


def row_of(place: str, value: object, *, torn: bool) -> Row:
    """Return a value that was read from JSON as a row; torn: its text may be none that a tokenizer takes."""
    if torn and (text := torn_text(value)):
        return Row(place, {}, f"half a surrogate pair, which is no character, in {text}")
    if isinstance(value, dict):
        return Row(place, cast("dict[str, object]", value))
    return Row(place, {}, f"not an object but {type(value).__name__}")
