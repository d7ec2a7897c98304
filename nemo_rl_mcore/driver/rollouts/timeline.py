"""Read from the log of an asynchronous run, for a replay, what it trained on and which weights had drawn it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_rl_mcore.driver.rollouts.events import Committed, Event, Finished, Published, Segment, Started


@dataclass(frozen=True)
class LoggedGroup:
    """From which token on which version sampled a group, and the digest of what was drawn."""

    segments: Sequence[Segment]
    digest: str

    @property
    def oldest(self) -> int:
        """Return the version of its first tokens."""
        return min(self.versions)

    @property
    def versions(self) -> list[int]:
        """Return the versions that sampled it."""
        return [segment.version for segment in self.segments]


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
                    found.groups[event.token.position] = LoggedGroup(event.segments, event.digest)
                case Finished():
                    found.chunks[event.step] = event.chunks
                case Published():
                    found.weights[event.version] = event.digest
                case _:
                    pass
        return found

    def positions(self, steps: range) -> list[int]:
        """Return the groups of these steps, in the order in which they were trained."""
        return [position for step in steps for chunk in self.chunks[step] for position in chunk]
