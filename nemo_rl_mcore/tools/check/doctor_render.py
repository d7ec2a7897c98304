"""The diagnosis as lines for the terminal: prose is broken at its width, commands stay whole."""

import textwrap
from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from nemo_rl_mcore.tools.check.doctor_findings import Diagnosis, Finding, Status

_STATUS_WIDTH, _NAME_WIDTH = 9, 20
_INDENT = " " * (2 + _STATUS_WIDTH)
_STYLES = {Status.OK: "green", Status.MISSING: "yellow", Status.WRONG: "red", Status.UNKNOWN: "yellow"}


def render(diagnosis: Diagnosis, width: int) -> Group:
    """Lay out a diagnosis in lines of `width` columns; print it with soft_wrap, so that no command is broken."""
    lines: list[Text] = []
    for section in diagnosis.sections:
        lines.append(Text(section.title, style="bold"))
        for finding in section.findings:
            lines += _lines(finding, width)
    return Group(*lines, *_verdict(diagnosis, width))


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    head = f"{finding.name:<{_NAME_WIDTH}}"
    # A long name, such as that of a key, stands on a line of its own.
    first, *rest = (
        textwrap.wrap(f"{head}{finding.found}", width - len(_INDENT), subsequent_indent=" " * _NAME_WIDTH)
        if len(head) == _NAME_WIDTH and head.endswith(" ")
        else [finding.name, *_wrapped(finding.found, width)]
    )
    status = f"  {finding.status:<{_STATUS_WIDTH}}"
    yield Text.assemble((status, _STYLES[finding.status]), first)
    for line in rest:
        yield Text(_INDENT + line)
    if finding.status is Status.OK:
        return
    if finding.enables:
        for line in _wrapped(f"for: {finding.enables}", width):
            yield Text(_INDENT + line)
    if finding.mend:
        yield Text(f"{_INDENT}  mend: {finding.mend}", style="bold" if finding.needed else "")


def _wrapped(text: str, width: int) -> list[str]:
    indent = "  "
    return textwrap.wrap(
        text, width - len(_INDENT), initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )


def _verdict(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    stopping = list(dict.fromkeys(finding.name for finding in diagnosis.stopping))
    if not stopping:
        yield Text("All that is needed is here.", style="bold green")
        return
    for line in textwrap.wrap(f"Needed, and missing or wrong: {', '.join(stopping)}.", width):
        yield Text(line, style="bold red")
