"""Whether an engine holds what was sent to it: digests of both sides, compared by the tensors' names."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.rank.refit.digests import sealed

type Digests = Mapping[str, int | None]
"""What was sent or is held, by Hugging Face name; None where only the name is told."""

_NAMED = 20
"""Tensors that a message names at most."""
_OF_NO_TENSOR = -1


class IncompleteRefitError(RuntimeError):
    """What an engine holds at the end of a refit is not what was sent."""


@dataclass(frozen=True)
class HeldBlock:
    """A block of a tensor, as one process of an engine holds it.

    dtype, shape: of the whole tensor. corner, size: row and column at which the block begins, how many it has, as
    `digests` counts them. total: its `digests.block_sum`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    corner: tuple[int, int]
    size: tuple[int, int]
    total: int


def require_as_sent(
    sent: Digests, held: Digests, *, unwritten: Iterable[str] = (), unreadable: Iterable[str] = ()
) -> None:
    """Raise IncompleteRefitError, naming the tensors, unless the same ones are held as were sent, bit for bit.

    unwritten: weights of the engine that nothing was loaded into. unreadable: those that could not be compared, each
    with the reason.
    """
    both = {name: (sent[name], held[name]) for name in sent if name in held}
    different = [name for name, pair in both.items() if None not in pair and pair[0] != pair[1]]
    found = {
        "not as they were sent": different,
        "sent and not found": [name for name in sent if name not in held],
        "there and not sent": [name for name in held if name not in sent],
        "without new weights": [*unwritten],
        "not to be read back (policy.generation.verify_refit: false does without)": [*unreadable],
    }
    wrong = [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
    if wrong:
        raise IncompleteRefitError(f"of {len(sent)} tensors " + "; ".join(wrong))


def of_all(sent: Digests) -> str:
    """Return one digest of all tensors together, 16 hexadecimal digits; empty where one of them has none."""
    if None in sent.values():
        return ""
    lines = "".join(f"{name} {number}\n" for name, number in sorted(sent.items()))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def joined(processes: Iterable[Iterable[HeldBlock]]) -> dict[str, int]:
    """Return the digests of the tensors whose blocks the processes of an engine hold; copies of a block count once.

    Where copies differ, or blocks leave a part of their tensor out, it is one that no tensor has.
    """
    blocks: dict[str, list[HeldBlock]] = {}
    for block in itertools.chain.from_iterable(processes):
        blocks.setdefault(block.name, []).append(block)
    return {name: _whole(of_tensor) for name, of_tensor in blocks.items()}


def _whole(blocks: Sequence[HeldBlock]) -> int:
    first = blocks[0]
    totals = {(block.corner, block.size): block.total for block in blocks}
    # Blocks are shards of one partition: two are the same, or do not overlap.
    entries = sum(rows * columns for _, (rows, columns) in totals)
    whole = entries == torch.Size(first.shape).numel()
    alike = all(
        (block.dtype, block.shape, block.total)
        == (first.dtype, first.shape, totals[block.corner, block.size])
        for block in blocks
    )
    if not (whole and alike):
        return _OF_NO_TENSOR
    return sealed(sum(totals.values()), getattr(torch, first.dtype), first.shape)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
