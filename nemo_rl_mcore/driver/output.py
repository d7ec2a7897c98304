"""Terminal output, whose failure does not affect a run: a terminal may be closed, or a pipe may have no reader."""

from __future__ import annotations

import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters, surrogates, line and paragraph separators."""
_KEPT = "\n\t"


def visible(text: str) -> str:
    """Escape characters that a terminal would obey or hide: escape sequences, control characters, direction marks.

    For all displayed text from models, data, environments and recipes, but not for program-readable output.
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
    """A text stream that drops unwritable text and writes nothing more after the first failure."""

    stream: IO[str]
    _gone: bool = False

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, call: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            call()
        except OSError:
            self._gone = True
            # Flushing the buffer would fail again when Python exits, and change the exit status.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                try:
                    os.dup2(nowhere, self.stream.fileno())
                finally:
                    os.close(nowhere)


def write_line(stream: IO[str], line: str) -> None:
    """Write a line and flush it, ignoring failures; see `visible`."""
    seen = BestEffortStream(stream)
    seen.write(f"{visible(line)}\n")
    seen.flush()


def print_plain(console: Console, text: str, end: str = "\n") -> None:
    """Print a text verbatim, without rich's markup, highlighting or line breaks."""
    console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


class VisibleConsole(Console):
    """A rich console that passes every text through `visible`, both on a terminal and in a file."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before it is measured, so that table columns stay aligned."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Escape the text of every rendered object."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def open_console(file: IO[str] | None = None, **options: Any) -> Console:
    """Open a console on standard output, or on `file`, that drops text which cannot be written.

    In a notebook, the console writes plain text instead of using the notebook's display, as rich would.
    """
    stream = cast("IO[str]", BestEffortStream(file or sys.stdout))
    plain: dict[str, Any] = {"force_jupyter": False, "force_terminal": False} if Console().is_jupyter else {}
    return VisibleConsole(file=stream, **(plain | options))
