"""The log of a run that samples: a line of JSON for each event, from which it can be reported and replayed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.driver.rollouts.events import (
    EVENT,
    Checkpointed,
    Committed,
    Event,
    Finished,
    Published,
    Segment,
    Started,
)
from nemo_rl_mcore.driver.run_folder import next_free, open_own
from nemo_rl_mcore.errors import FolderError, RefusedError, RunStoppedError, code_of, folder_error, quoted

EVENTS_FILE = "groups.jsonl"
"""Of a run, in its log_dir."""
_BLOCK = 1 << 20


class LogMark(BaseModel):
    """A place in a log: so many bytes, and their hash, by which the log is known again."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    size: Annotated[int, Field(ge=0)]
    sha256: str


BEGINNING = LogMark(size=0, sha256=hashlib.sha256().hexdigest())


class EventLog:
    """Appends events to a file; an event is in the file when `append` returns.

    So it outlives this process at once, and the machine from the end of each train step and checkpoint on. What a
    process that was killed had written of its last line is cut off first. Raises OSError, naming the file, when it
    cannot be written; the line that failed is not in the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_own(path, os.O_RDWR)
        try:
            self._size = _whole_lines(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
            self._hash = hashlib.sha256()
            for start in range(0, self._size, _BLOCK):
                self._hash.update(os.pread(self._descriptor, min(_BLOCK, self._size - start), start))
        except BaseException:
            self.close()
            raise

    def append(self, event: Event) -> None:
        """Write an event, and wait for the disk where a train step or a checkpoint has ended."""
        line, written = EVENT.dump_json(event) + b"\n", 0
        try:
            while written < len(line):
                written += os.pwrite(self._descriptor, line[written:], self._size + written)
            if isinstance(event, Finished | Checkpointed):
                os.fsync(self._descriptor)
        except BaseException as error:  # a second Ctrl-C, too: a part of a line is damage
            os.ftruncate(self._descriptor, self._size)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            raise
        self._size += len(line)
        self._hash.update(line)

    def mark(self) -> LogMark:
        """Return where the log stands; up to there it is on disk: a checkpoint never names events that are not."""
        os.fsync(self._descriptor)
        return LogMark(size=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Close the file; once more does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a log; a last line without an end is left out, as the process was killed while it wrote it.

    Raises ValueError naming file and line for one that is damaged, OSError for a file that cannot be read.
    """
    *lines, _ = read_regular(path).split(b"\n")
    return [_event(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


class RunLog(EventLog):
    """Appends to the log of a run in its folder; failures are FolderErrors.

    before: the events of earlier starts. That the optimizer has stepped is never refused: the step is recorded first,
    and the event after it raises.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failure: FolderError | None = None
        path = folder / EVENTS_FILE
        try:
            self.before = read_events(path) if path.exists() else []
            super().__init__(path)
        except OSError as error:
            raise folder_error("logger.log_dir", folder, error) from error
        except ValueError as error:
            raise RunStoppedError(
                f"logger.log_dir: {error}; name another folder, or remove the file", code=code_of(error)
            ) from error

    def append(self, event: Event) -> None:
        """Write an event; raises FolderError, also for one before it that could not be written."""
        if self._failure is not None:
            raise self._failure
        try:
            super().append(event)
        except OSError as error:
            self._failure = folder_error("logger.log_dir", self._folder, error)
            if not isinstance(event, Finished):
                raise self._failure from error


def set_aside_after(path: Path, mark: LogMark) -> bool:
    """Move what a log holds after a mark into a numbered file next to it, and all of a log that is not the mark's.

    Returns whether the log goes on from the mark. The rest is copied first: wherever the process dies, no event is
    lost. Raises OSError.
    """
    content = read_regular(path, follow_links=False) if path.exists() else b""
    kept = content[: mark.size]
    known = hashlib.sha256(kept).hexdigest() == mark.sha256
    size = len(kept) if known else 0
    if size < len(content):
        with next_free(path).open("xb") as aside:
            aside.write(content[size:])
            os.fsync(aside.fileno())
        os.truncate(path, size)
    return known


def _event(line: bytes, place: str) -> Event:
    try:
        parse_json(line.decode())  # stricter than what follows: a key that is there twice is damage, too
        return EVENT.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError(
            f"{place}: it is no event: {where and f'{where}: '}{first['msg']}", code="broken-event"
        ) from error
    except ValueError as error:
        raise RefusedError(
            f"{place}: it is no event: {error} ({quoted(line)})", code="broken-event"
        ) from error


def _whole_lines(descriptor: int) -> int:
    """Return the bytes of a file up to its last line end."""
    end, block = os.fstat(descriptor).st_size, 4096
    while end:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


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
    """What an asynchronous run trained on and which weights had drawn it, of the steps that no resume has taken back.

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
