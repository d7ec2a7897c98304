"""What the doctor finds: one line for each thing that it looks at."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a thing fares."""

    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    found: what is there, in words. enables: what is done with it, where that does not work. mend: the command that
    mends it, or what to do. needed: whether runs, or the given recipe, do not go without it.
    """

    name: str
    status: Status
    found: str
    enables: str = ""
    mend: str = ""
    needed: bool = False

    @property
    def stops(self) -> bool:
        """Return whether something that is needed is missing, wrong or unknown."""
        return self.needed and self.status is not Status.OK


@dataclass(frozen=True)
class Section:
    """Findings of one kind."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    sections: tuple[Section, ...]

    @property
    def stopping(self) -> tuple[Finding, ...]:
        """Return what is needed and missing or wrong."""
        return tuple(one for section in self.sections for one in section.findings if one.stops)

    def as_json(self) -> dict[str, object]:
        """Return the diagnosis as an object of JSON."""
        return {"ok": not self.stopping, "sections": [asdict(section) for section in self.sections]}


def ok(name: str, found: str) -> Finding:
    """Return a thing that is as it should be."""
    return Finding(name, Status.OK, found)


def section(title: str, findings: Iterable[Finding]) -> Section:
    """Return a section of findings that are made one by one."""
    return Section(title, tuple(findings))
