"""A row as it lies in its source, and what keeps a source from being read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_mcore.config.base import Code, Problem


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
