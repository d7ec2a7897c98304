"""From what Ray reports about its actors to one error that a person can act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayTaskError

from nemo_rl_mcore.errors import RunStoppedError

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_CARETS_ONLY = re.compile(r"^\s*[\^~]+\s*\n", re.MULTILINE)
_HOST = re.compile(r"\bip[=:]\s*([\w.:]+\w)")
_PID = re.compile(r"\bpid[=:]\s*(\d+)")
_RAY_ADVICE = " Some common causes include"
_STDERR_TAIL_LINES = 30


@dataclass(frozen=True)
class RankIdentity:
    """Which process a rank is."""

    host: str
    pid: int
    ray_worker_id: str

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


def identity_in(report: str) -> RankIdentity:
    """Read host and process from the text of Ray's error, for a rank that never introduced itself."""
    host, pid = _HOST.search(report), _PID.search(report)
    return RankIdentity(host[1] if host else "unknown", int(pid[1]) if pid else 0, ray_worker_id="")


class WorkerError(RunStoppedError):
    """One rank of a worker group failed; the message is complete, with the traceback of that rank.

    Attributes:
        rank: the rank that failed first, or -1 when no rank did and a deadline passed.
        host: its machine.
        method: what the group was asked to do.
        context: what the caller said it was for, such as "step 12".
        cause: the exception that the rank raised, when it raised one that could be sent back.

    """

    def __init__(self, message: str, failure: RankFailure | None, method: str, context: str) -> None:
        super().__init__(message)
        self.rank = -1 if failure is None else failure.rank
        self.host = "" if failure is None else failure.identity.host
        self.cause = None if failure is None else failure.cause
        self.method = method
        self.context = context


@dataclass(frozen=True)
class RankFailure:
    """What one rank reported: an exception that it raised, or its death."""

    rank: int
    identity: RankIdentity
    error: BaseException

    @property
    def died(self) -> bool:
        """Whether the process is gone, as opposed to a method that raised."""
        return not isinstance(self.error, RayTaskError)

    @property
    def cause(self) -> BaseException | None:
        """The exception as the rank raised it."""
        return self.error.cause if isinstance(self.error, RayTaskError) else None

    def headline(self) -> str:
        """One line of what happened."""
        if self.cause is not None:
            lines = str(self.cause).strip().splitlines() or [""]
            return f"{type(self.cause).__name__}: {lines[0]}"
        return self.details().splitlines()[-1].strip()

    def details(self) -> str:
        """Everything that Ray knows, with the remote traceback, without terminal codes."""
        plain = _TERMINAL_CODES.sub("", str(self.error)).split(_RAY_ADVICE)[0]
        return _CARETS_ONLY.sub("", plain).strip()


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Choose the failure that the others follow from, out of failures in the order of their arrival.

    When a process dies its peers' collectives fail, sometimes before Ray notices the death: it comes first.
    """
    return next((failure for failure in failures if failure.died), failures[0])


def stderr_tail(log_dir: Path | None, identity: RankIdentity) -> str:
    """Last lines that a rank wrote to its standard error; empty when they are not on this machine."""
    if log_dir is None or not identity.ray_worker_id:
        return ""
    files = sorted(log_dir.glob(f"worker-{identity.ray_worker_id}-*.err"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(":")]  # Ray's own markers
    return "\n".join(kept[-_STDERR_TAIL_LINES:])


def describe(
    failures: Sequence[RankFailure], hung: Sequence[int], where: str, log_dir: Path | None, noun: str = "rank"
) -> str:
    """Write the message of a `WorkerError`: the root cause in full, and a line for every other rank."""
    root = root_cause(failures)
    kind = "died" if root.died else "failed"
    parts = [f"{noun} {root.rank} ({root.identity}) {kind} in {where}: {root.headline()}"]
    others = [f"{noun} {failure.rank}: {failure.headline()}" for failure in failures if failure is not root]
    others += [f"{noun} {rank}: still waiting, stopped" for rank in hung]
    if others:
        parts.append("after it:\n" + "\n".join(f"  {line}" for line in others))
    parts.append(f"--- {noun} {root.rank}, as reported ---\n{root.details()}")
    if root.died and (tail := stderr_tail(log_dir, root.identity)):
        parts.append(f"--- {noun} {root.rank}, end of its standard error ---\n{tail}")
    return "\n".join(parts)
