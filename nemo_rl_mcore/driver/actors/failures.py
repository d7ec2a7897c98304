"""Conversion of Ray's reports about actors into a single error that the user can act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.errors import PeerLostError, RanksFailedError, code_of

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_CARETS_ONLY = re.compile(r"^\s*[\^~]+\s*\n", re.MULTILINE)
_RAY_ADVICE = " Some common causes include"
_STDERR_TAIL_LINES = 30
_AT_A_MEETING = "raise_together"
_STACK = "--- {noun} {rank}, where it stood ---\n{stack}"
# Prefix with which ranks report other ranks' errors; see `agreement.raise_together`.
_OF_A_PEER = re.compile(r"['\"]?rank \d+: ")


@dataclass(frozen=True)
class RankIdentity:
    """A rank's process. node_id: Ray's id for its node; a host may run several nodes."""

    host: str
    pid: int
    ray_worker_id: str
    node_id: str = ""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


@dataclass(frozen=True)
class WorkerCall:
    """A call to a worker group, such as "policy". context: the call's purpose, such as "step 12".

    timeout_s: allowed seconds without progress. key: the recipe key of this deadline.
    """

    method: str
    context: str = ""
    timeout_s: float = 0.0
    key: str = ""
    group: str = ""

    def __str__(self) -> str:
        return f"{self.method} ({self.context})" if self.context else self.method

    def not_started(self, why: str, code: str, *, final: bool = False) -> WorkerError:
        return WorkerError(f"{self} was not started: {why}", self, final=final, code=code)

    def end_of_session(self, lost: str) -> WorkerError:
        message = f"{self} did not end: {lost}, and the Ray session with it; its ranks are stopped"
        return WorkerError(message, self, final=True, code="session-lost")


class WorkerError(RanksFailedError):
    """A rank of a worker group failed; the message includes the rank's traceback.

    rank, host: those of the first failure; rank is -1 if a deadline passed. method, context, group: see `WorkerCall`.
    cause: the exception that the rank raised, if it could be sent back. code: the cause's code, or rank-died,
    node-lost, no-progress, session-lost, interrupted, shut-down, ended-before (by an earlier failure). usable: True if
    the group can still be called, since every rank has answered. final: True if Ray itself died. lost_node: Ray's id
    and the address of a rank's machine, if the whole machine was lost.
    """

    def __init__(
        self,
        message: str,
        call: WorkerCall,
        failure: RankFailure | None = None,
        *,
        usable: bool = False,
        final: bool = False,
        lost_node: str | None = None,
        code: str = "",
    ) -> None:
        if failure is not None and not code:
            code = "rank-died" if failure.died else code_of(failure.cause)
            code = code if failure.lost_node is None else "node-lost"
        super().__init__(message, code=code)
        self.rank = -1 if failure is None else failure.rank
        self.host = "" if failure is None else failure.identity.host
        self.cause = None if failure is None else failure.cause
        self.method, self.context, self.group = call.method, call.context, call.group
        self.usable, self.final = usable, final
        self.lost_node = lost_node or (None if failure is None else failure.lost_node)


@dataclass(frozen=True)
class RankFailure:
    """An exception that a rank raised, or a rank's death.

    report: Ray's text, with the traceback. cause: the rank's exception. died: True if the process died, False if a
    method raised. lost_node: the rank's machine, if it was lost.
    """

    rank: int
    identity: RankIdentity
    report: str
    cause: BaseException | None = None
    died: bool = True
    lost_node: str | None = None

    @property
    def is_of_a_peer(self) -> bool:
        return isinstance(self.cause, PeerLostError) or _OF_A_PEER.match(str(self.cause)) is not None

    def headline(self) -> str:
        if self.cause is not None:
            lines = str(self.cause).strip().splitlines() or [""]
            return f"{type(self.cause).__name__}: {lines[0]}"
        if self.lost_node is not None:
            return f"node {self.lost_node} is gone"
        return self.details().splitlines()[-1].strip()

    def details(self) -> str:
        plain = _TERMINAL_CODES.sub("", self.report).split(_RAY_ADVICE)[0]
        return _CARETS_ONLY.sub("", plain).strip()


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that caused the others; failures: in order of arrival.

    Deaths come first, since a process's death makes its peers' collectives fail, sometimes before Ray notices it.
    Errors copied from other ranks come last.
    """
    return min(failures, key=lambda failure: (not failure.died, failure.is_of_a_peer and not failure.died))


def stderr_tail(log_dir: Path | None, identity: RankIdentity) -> str:
    """Return the last lines of a rank's standard error; empty if its log is on another machine."""
    if log_dir is None or not identity.ray_worker_id:
        return ""
    lines: list[str] = []
    for file in sorted(log_dir.glob(f"worker-{identity.ray_worker_id}-*.err")):
        for line in file.read_text(errors="replace").splitlines():
            if line.strip() and not line.startswith(":"):  # one of Ray's own markers
                lines.append(line)
    return "\n".join(lines[-_STDERR_TAIL_LINES:])


@dataclass(frozen=True)
class Stall:
    """A rank that did not return in time and was killed.

    doing: the rank's last activity. stack: its Python stack. silent: the state of a process that did not report its
    activity, else None. lost_node: the rank's machine, if it was lost.
    """

    rank: int
    identity: RankIdentity | None
    doing: str = ""
    stack: str = ""
    silent: str | None = None
    lost_node: str | None = None

    def __str__(self) -> str:
        if self.lost_node is not None:
            return f"does not answer: node {self.lost_node} is gone"
        if self.silent is not None:
            return f"does not answer{self.silent}"
        return f"last began {self.doing!r}" if self.doing else "has not begun"


def hung_first(stalls: Sequence[Stall]) -> list[Stall]:
    """Sort stalled ranks: first those that block the others (silent, or not at a meeting of the ranks)."""
    return sorted(stalls, key=lambda stall: (stall.silent is None, _AT_A_MEETING in stall.stack))


def describe_stall(
    stalls: Sequence[Stall], ranks: int, call: WorkerCall, noun: str = "rank", *, stopping: bool = False
) -> str:
    """Return a `WorkerError`'s message for a missed deadline or, if stopping, for ranks that hung during the stop."""
    key = f" ({call.key})" if call.key else ""
    why = "hung when the run was to stop" if stopping else f"made no progress for {call.timeout_s:g} s{key}"
    stalls = hung_first(stalls)
    names = ", ".join(f"{noun} {one.rank} ({one.identity or 'starting'}), which {one}" for one in stalls)
    parts = [f"{call} {why}: stopped {names}; {ranks - len(stalls)} of {ranks} {noun}s returned"]
    parts += [_STACK.format(noun=noun, rank=one.rank, stack=one.stack) for one in stalls if one.stack]
    return "\n".join(parts)


def describe(
    failures: Sequence[RankFailure],
    stalls: Sequence[Stall],
    where: str,
    log_dir: Path | None,
    noun: str = "rank",
) -> str:
    """Return a `WorkerError`'s message: the root cause in full, and a line for every other rank."""
    root = root_cause(failures)
    others = [f"{noun} {one.rank}: {one.headline()}" for one in failures if one is not root]
    waiting = list(stalls)
    if stalls and not root.died and root.is_of_a_peer:
        # The cause is a hung rank that the others waited for.
        hung = hung_first(stalls)[0]
        waiting.remove(hung)
        others = [f"{noun} {one.rank}: {one.headline()}" for one in failures]
        parts = [f"{noun} {hung.rank} ({hung.identity or 'starting'}) did not return from {where}: it {hung}"]
    else:
        kind = "was lost" if root.lost_node else "died" if root.died else "failed"
        parts = [f"{noun} {root.rank} ({root.identity}) {kind} in {where}: {root.headline()}"]
    others += [f"{noun} {one.rank}: still waiting, stopped; it {one}" for one in waiting]
    if others:
        parts.append("after it:\n" + "\n".join(f"  {line}" for line in others))
    parts.append(f"--- {noun} {root.rank}, as reported ---\n{root.details()}")
    if root.died and (tail := stderr_tail(log_dir, root.identity)):
        parts.append(f"--- {noun} {root.rank}, end of its standard error ---\n{tail}")
    parts += [_STACK.format(noun=noun, rank=one.rank, stack=one.stack) for one in stalls if one.stack]
    return "\n".join(parts)
