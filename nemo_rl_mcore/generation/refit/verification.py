"""Whether an engine holds what was sent to it: digests of both sides, compared by the tensors' names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.generation.refit.digests import sealed

type Digests = Mapping[str, int | None]
"""What was sent or is held, by Hugging Face name; None where only the name is told."""

_NAMED = 20
"""Tensors that a message names at most."""


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


def require_as_sent(sent: Digests, held: Digests, unreadable: Iterable[str] = ()) -> None:
    """Raise IncompleteRefitError, naming the tensors, unless the same ones are held as were sent, bit for bit.

    unreadable: weights of the engine that could not be compared, each with the reason.
    """
    different = [
        name for name in sent if name in held and None not in (pair := (sent[name], held[name])) and len({*pair}) > 1
    ]
    found = {
        "not as they were sent": different,
        "sent and not there": [name for name in sent if name not in held],
        "there and not sent": [name for name in held if name not in sent],
        "not to be read back (policy.generation.verify_refit: false does without)": [*unreadable],
    }
    wrong = [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
    if wrong:
        raise IncompleteRefitError(f"of {len(sent)} tensors " + "; ".join(wrong))


def joined(processes: Sequence[Iterable[HeldBlock]]) -> dict[str, int]:
    """The digests of the tensors whose blocks the processes of an engine hold; copies of a block count once.

    Raises IncompleteRefitError where copies differ, or blocks leave a part of their tensor out.
    """
    blocks: dict[str, list[HeldBlock]] = {}
    for block in itertools.chain.from_iterable(processes):
        blocks.setdefault(block.name, []).append(block)
    held = {name: _whole(of_tensor) for name, of_tensor in blocks.items()}
    broken = [name for name, digest in held.items() if digest is None]
    if broken:
        raise IncompleteRefitError(
            f"the engine's processes hold different copies of a tensor, or a part of it is nowhere: {_some(broken)}"
        )
    return {name: digest for name, digest in held.items() if digest is not None}


def _whole(blocks: Sequence[HeldBlock]) -> int | None:
    first = blocks[0]
    if {(block.dtype, block.shape) for block in blocks} != {(first.dtype, first.shape)}:
        return None
    totals = {(block.corner, block.size): block.total for block in blocks}
    if any(totals[block.corner, block.size] != block.total for block in blocks):
        return None
    # Blocks are shards of one partition: they overlap either not at all or as copies.
    if sum(rows * columns for _, (rows, columns) in totals) != torch.Size(first.shape).numel():
        return None
    return sealed(sum(totals.values()), getattr(torch, first.dtype), first.shape)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
