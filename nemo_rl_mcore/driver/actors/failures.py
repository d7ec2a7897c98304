"""From what Ray reports about its actors to one error that a person can act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.errors import PeerLostError, RanksFailedError, code_of

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_CARETS_ONLY = re.compile(r"^\s*[\^~]+\s*\n", re.MULTILINE)
_HOST = re.compile(r"\bip[=:]\s*([\w.:]+\w)")
_PID = re.compile(r"\bpid[=:]\s*(\d+)")
_NODE = re.compile(r"\bnode has died[\s\S]*?Node I[dD]: (\w+)")
_RAY_ADVICE = " Some common causes include"
_STDERR_TAIL_LINES = 30
_AT_A_MEETING = "raise_together"
# How ranks report the errors of others, see `agreement.raise_together`.
_OF_A_PEER = re.compile(r"['\"]?rank \d+: ")


@dataclass(frozen=True)
class RankIdentity:
    """Which process a rank is. node_id: Ray's, of its machine; several on one host are machines in name."""

    host: str
    pid: int
    ray_worker_id: str
    node_id: str = ""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


def identity_in(report: str) -> RankIdentity:
    """Read host and process from the text of Ray's error, for a rank that never introduced itself."""
    host, pid, node = ((found := pattern.search(report)) and found[1] for pattern in (_HOST, _PID, _NODE))
    return RankIdentity(host or "unknown", int(pid or 0), ray_worker_id="", node_id=node or "")


@dataclass(frozen=True)
class WorkerCall:
    """Says what the ranks of a group, such as "policy", are asked, and what for, such as "step 12".

    timeout_s: seconds without progress. key: of the recipe, that has the deadline.
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
    """One rank of a worker group failed; the message is complete, with the traceback of that rank.

    rank, host: the one that failed first, -1 when none did and a deadline passed. method, context, group: see
    `WorkerCall`. cause: the exception that the rank raised, where it could be sent back. code: that of the cause; of
    others rank-died, node-lost, no-progress, session-lost, interrupted, shut-down, or ended-before for a group that an
    earlier failure ended. usable: the group can still be called, since every rank has answered. final: Ray itself is
    gone. lost_node: the machine of a rank, by Ray's id and its address, where that is gone, as opposed to the rank.
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
        super().__init__(message, code=code or (failure.code if failure else ""))
        self.rank = -1 if failure is None else failure.rank
        self.host = "" if failure is None else failure.identity.host
        self.cause = None if failure is None else failure.cause
        self.method, self.context, self.group = call.method, call.context, call.group
        self.usable, self.final = usable, final
        self.lost_node = lost_node or (None if failure is None else failure.lost_node)


@dataclass(frozen=True)
class RankFailure:
    """Holds what one rank reported: an exception that it raised, or its death.

    report: all that is known, with the traceback. cause: the exception as the rank raised it. died: the process is
    gone, as opposed to a method that raised. lost_node: its machine, if that is gone.
    """

    rank: int
    identity: RankIdentity
    report: str
    cause: BaseException | None = None
    died: bool = True
    lost_node: str | None = None

    @property
    def code(self) -> str:
        if self.lost_node is not None:
            return "node-lost"
        return "rank-died" if self.died else code_of(self.cause)

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
    """Choose the failure that the others follow from, out of failures in the order of their arrival.

    When a process dies its peers' collectives fail, sometimes before Ray notices the death: it comes first. Errors that
    ranks take over from another one come last.
    """
    return min(failures, key=lambda failure: (not failure.died, failure.is_of_a_peer and not failure.died))


def stderr_tail(log_dir: Path | None, identity: RankIdentity) -> str:
    """Return the last lines that a rank wrote to its standard error; empty when they are not on this machine."""
    if log_dir is None or not identity.ray_worker_id:
        return ""
    files = sorted(log_dir.glob(f"worker-{identity.ray_worker_id}-*.err"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(":")]  # Ray's own markers
    return "\n".join(kept[-_STDERR_TAIL_LINES:])


@dataclass(frozen=True)
class Stall:
    """A rank that did not return, and was stopped for it.

    doing: what it began last. stack: where it stood in its Python code. silent: what is known of the process, if
    it did not even say that; None if it did. lost_node: its machine, if that is gone.
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
    """Sort stalled ranks, those first that the others wait for: silent, or not at a meeting of the ranks."""
    return sorted(stalls, key=lambda stall: (stall.silent is None, _AT_A_MEETING in stall.stack))


def describe_stall(
    stalls: Sequence[Stall], ranks: int, call: WorkerCall, noun: str = "rank", *, stopping: bool = False
) -> str:
    """Write the message of a `WorkerError` about a deadline: who did not return, and where each of them stood.

    stopping: the deadline was not reached, but the run was to stop.
    """
    key = f" ({call.key})" if call.key else ""
    why = "hung when the run was to stop" if stopping else f"made no progress for {call.timeout_s:g} s{key}"
    stalls = hung_first(stalls)
    names = ", ".join(
        f"{noun} {stall.rank} ({stall.identity or 'starting'}), which {stall}" for stall in stalls
    )
    first = f"{call} {why}: stopped {names}; {ranks - len(stalls)} of {ranks} {noun}s returned"
    stacks = [f"--- {noun} {one.rank}, where it stood ---\n{one.stack}" for one in stalls if one.stack]
    return "\n".join([first, *stacks])


def describe(
    failures: Sequence[RankFailure],
    stalls: Sequence[Stall],
    where: str,
    log_dir: Path | None,
    noun: str = "rank",
) -> str:
    """Write the message of a `WorkerError`: the root cause in full, and a line for every other rank."""
    root = root_cause(failures)
    lines = {failure: f"{noun} {failure.rank}: {failure.headline()}" for failure in failures}
    waiting = {stall: f"{noun} {stall.rank}: still waiting, stopped; it {stall}" for stall in stalls}
    if stalls and not root.died and root.is_of_a_peer:
        # The others waited for one that hangs: that is the one to look at.
        hung = hung_first(stalls)[0]
        waiting.pop(hung)
        parts = [f"{noun} {hung.rank} ({hung.identity or 'starting'}) did not return from {where}: it {hung}"]
    else:
        lines.pop(root)
        kind = "was lost" if root.lost_node else "died" if root.died else "failed"
        parts = [f"{noun} {root.rank} ({root.identity}) {kind} in {where}: {root.headline()}"]
    others = [*lines.values(), *waiting.values()]
    if others:
        parts.append("after it:\n" + "\n".join(f"  {line}" for line in others))
    parts.append(f"--- {noun} {root.rank}, as reported ---\n{root.details()}")
    if root.died and (tail := stderr_tail(log_dir, root.identity)):
        parts.append(f"--- {noun} {root.rank}, end of its standard error ---\n{tail}")
    parts += [f"--- {noun} {one.rank}, where it stood ---\n{one.stack}" for one in stalls if one.stack]
    return "\n".join(parts)
