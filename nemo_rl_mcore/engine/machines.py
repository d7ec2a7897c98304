"""Have the processes of an engine on several machines find each other, by variables of their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_NUMBER, _COUNT, _OWN = "NODE_RANK", "NNODES", "NODE_ADDR"
_FIRST, _PORT = "MASTER_ADDR", "MASTER_PORT"


@dataclass(frozen=True)
class Machines:
    """The machines of an engine, as one of them sees them.

    first, own: addresses of the first one, where they meet, and of this one. number: of this one. count: how many there
    are. port: where they meet, which the first one finds free when it starts.
    """

    first: str
    own: str
    number: int
    count: int
    port: int = 0

    def environment(self) -> dict[str, str]:
        """Return what tells a process which one of them it is on; the port comes when it is known."""
        return {_FIRST: self.first, _OWN: self.own, _NUMBER: str(self.number), _COUNT: str(self.count)}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """Return what a process was told; None for an engine that is on one machine."""
        if _COUNT not in environ:
            return None
        number, count = int(environ[_NUMBER]), int(environ[_COUNT])
        return cls(environ[_FIRST], environ[_OWN], number, count, int(environ[_PORT]))

    @classmethod
    def here(cls) -> Self | None:
        """Return what this process was told."""
        return cls.of(os.environ)
