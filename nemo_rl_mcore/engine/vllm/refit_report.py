"""What the processes of an engine say at the end of a refit, and whether that is what was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nemo_rl_mcore.rank.refit.verification import Digests, HeldBlock, joined, require_as_sent


@dataclass(frozen=True)
class ProcessReport:
    """One process's.

    received: names of the tensors that arrived. unwritten: parameters of the model that nothing was loaded into.
    blocks: what its model holds; unreadable: parameters of which that cannot be said, with the reason.
    """

    received: Sequence[str]
    unwritten: Sequence[str]
    blocks: Sequence[HeldBlock]
    unreadable: Sequence[str]

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Of plain data, in which a process of vLLM's answers."""
        blocks = [
            HeldBlock(
                block["name"],
                block["dtype"],
                tuple(block["shape"]),
                tuple(block["corner"]),
                tuple(block["size"]),
                block["total"],
            )
            for block in message["blocks"]
        ]
        return cls(message["received"], message["unwritten"], blocks, message["unreadable"])


def reads_back(sent: Digests) -> bool:
    """Return whether there is something to compare."""
    return any(digest is not None for digest in sent.values())


def require_refit(sent: Digests, messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise IncompleteRefitError, naming tensors, unless every process has what was sent; `messages` of all."""
    reports = [ProcessReport.from_message(message) for message in messages]
    for report in reports:
        require_as_sent(sent, dict.fromkeys(report.received), unwritten=report.unwritten)
    if reads_back(sent):
        unreadable = dict.fromkeys(name for report in reports for name in report.unreadable)
        require_as_sent(sent, joined(report.blocks for report in reports), unreadable=unreadable)
