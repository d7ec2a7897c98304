"""The console of all tables and panels: its own colours pass, control characters of what is shown do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from nemo_rl_mcore.driver.output import BestEffortStream, visible


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
