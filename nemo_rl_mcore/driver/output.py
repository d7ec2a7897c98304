"""What is written for a person to see, as far as somebody is there: a terminal may be closed, a pipe have no reader.

What a run leaves behind does not depend on it. Tables and panels have a console of rich, whose own colours pass.
"""

from __future__ import annotations

import os
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control and format characters, halves of pairs, separators of lines and paragraphs."""
_KEPT = "\n\t"


def visible(text: str) -> str:
    """Spell out what a terminal would obey or hide: escape sequences, other control characters, turns of direction.

    Whatever a person sees of models, data, environments and recipes passes here; what programs read does not.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if character not in _KEPT and unicodedata.category(character) in _ESCAPED
        else character
        for character in text
    )


def command(*words: str) -> str:
    return visible(shlex.join(("nemo-rl-mcore", *words)))


@dataclass(eq=False)
class BestEffortStream:
    """A text stream that drops what cannot be written; after the first failure it writes nothing more."""

    stream: IO[str]
    _gone: bool = False

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self.stream.write(text)
            except OSError:
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self.stream.flush()
            except OSError:
                self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _give_up(self) -> None:
        self._gone = True
        # What its buffer still holds would fail again when Python ends, and change the exit status.
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self.stream.fileno())
            finally:
                os.close(nowhere)


def write_line(stream: IO[str], line: str) -> None:
    """Write a line that is seen at once, if somebody is there to see it; see `visible`."""
    seen = BestEffortStream(stream)
    seen.write(f"{visible(line)}\n")
    seen.flush()


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


class VisibleConsole(Console):
    """A console of rich that shows every text as `visible` spells it, on a terminal and in a file alike."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Spell a text out before it is measured, so that tables keep their columns."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Spell out what came as anything but a text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def open_console(file: IO[str] | None = None, **options: Any) -> Console:
    """Open a console on standard output, or on `file`, that drops what cannot be written.

    A notebook is no terminal, although its standard output says so: nothing moves up there to be drawn again. It gets
    plain text, which rich would show in place of writing it.
    """
    stream = cast("IO[str]", BestEffortStream(file or sys.stdout))
    plain: dict[str, Any] = {"force_jupyter": False, "force_terminal": False} if Console().is_jupyter else {}
    return VisibleConsole(file=stream, **(plain | options))
