"""What an asynchronous run trained on, and with which weights it was drawn: its log, read for a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_rl_mcore.controllers.events import (
    Committed,
    Event,
    Finished,
    LoggedTurn,
    Published,
    Segment,
    Started,
)


@dataclass(frozen=True)
class LoggedGroup:
    """From which token on which version drew a group, and the digest of what was drawn.

    turns: the same of each turn, with what the environment said; empty in a log that does not tell.
    """

    segments: Sequence[Segment]
    digest: str
    turns: Sequence[LoggedTurn] = ()

    @property
    def oldest(self) -> int:
        """The version of its first tokens."""
        return min(self.versions)

    @property
    def versions(self) -> list[int]:
        """The versions that drew it, turn by turn where the log tells turns."""
        by_turn = [segment.version for turn in self.turns for segment in turn.segments]
        return by_turn or [segment.version for segment in self.segments]


@dataclass(frozen=True)
class Timeline:
    """Of the steps that count: those that a later resume has not taken back.

    chunks: positions by step. groups: by position. weights: the digest of each version that engines were given.
    """

    chunks: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict[int, Sequence[Sequence[int]]])
    groups: dict[int, LoggedGroup] = field(default_factory=dict[int, LoggedGroup])
    weights: dict[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """Read a log from its beginning."""
        found = cls()
        for event in events:
            match event:
                case Started():
                    for step in [step for step in found.chunks if step > event.version]:
                        del found.chunks[step]
                        found.weights.pop(step, None)
                case Committed():
                    group = LoggedGroup(event.segments, event.digest, event.turns)
                    found.groups[event.token.position] = group
                case Finished():
                    found.chunks[event.step] = event.chunks
                case Published():
                    found.weights[event.version] = event.digest
                case _:
                    pass
        return found

    def positions(self, steps: range) -> list[int]:
        """The groups of these steps, in the order in which they were trained."""
        return [position for step in steps for chunk in self.chunks[step] for position in chunk]
