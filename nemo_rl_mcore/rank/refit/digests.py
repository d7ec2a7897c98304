"""Digests of weights, to verify tensor by tensor that an engine holds the same bits as the trainer.

A tensor is read as a matrix of words: its last dimension is the columns, all others are the rows (one dimension alone
is the rows of a single column), and a word is an entry's bits as an integer, two of 32 bits where it has 64. The digest
is, modulo 2^64, the sum over all words of

    row_weight[row] * column_weight[column] * word

and a hash of dtype and shape. The weights are odd pseudo-random numbers of 64 bits. So blocks of one tensor add up to
the whole, wherever they are held and however they are cut, and the number is the same on every device.

A tensor with one wrong word always has another digest. Two tensors that differ otherwise have the same one with a
probability of at most 2^-56, over the choice of the weights; 2^-41 where the differences are in the sign bits of
16-bit numbers alone, 2^-26 in those of 32-bit numbers. The weights are fixed and public: this detects faults, not
forgery.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from nemo_rl_mcore.ops.sampling import GOLDEN_GAMMA, signed_64, splitmix64

_ALL_BITS = (1 << 64) - 1
_ROWS, _COLUMNS = 0x243F6A8885A308D3, 0x13198A2E03707344
"""Seeds of the two kinds of weights: digits of pi."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WORDS_AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Words per block, at eight bytes each: a core's cache, and 32 MiB on a GPU."""


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the digests of many tensors, by name."""
    digester = Digester()
    for name, tensor in tensors:
        digester.add(name, tensor)
    return digester.digests()


class Digester:
    """Computes the digests of a stream of tensors, cast to the torch dtype named `held_as`, except experts' biases."""

    def __init__(self, held_as: str | None = None) -> None:
        self._held_as: torch.dtype | None = None if held_as is None else getattr(torch, held_as)
        self._sums: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, which may change afterwards."""
        dtype = tensor.dtype
        if self._held_as is not None:
            # Cast on this side: engines cast nothing, and do not know model families.
            from nemo_rl_mcore.models.weights import EXPERT_BIAS_NAME

            dtype = dtype if name.endswith(EXPERT_BIAS_NAME) else self._held_as
        self._sums[name] = block_sum(tensor, dtype=dtype)
        self._kinds[name] = dtype, tensor.shape

    def digests(self) -> dict[str, int]:
        return {name: sealed(total, *self._kinds[name]) for name, total in read(self._sums).items()}


def block_sum(
    block: torch.Tensor, *, first_row: int = 0, first_column: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a block's contribution to the sum of its tensor, int64 [] on the block's device, signed.

    first_row, first_column: position of the block in the whole tensor. dtype: cast to this dtype first.
    """
    dtype = dtype or block.dtype
    matrix = block.detach()
    matrix = matrix.reshape(-1, 1) if matrix.ndim < 2 else matrix.flatten(0, -2)
    word = _WORDS[dtype.itemsize]
    words = dtype.itemsize // word.itemsize
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    limit = _WORDS_AT_A_TIME[block.device.type] // words
    column = first_column
    for columns in matrix.split(limit, dim=1):
        width = columns.shape[1]
        column_weights = _weights(_COLUMNS, column * words, width * words, block.device)
        column += width
        row = first_row
        for rows in columns.split(limit):
            row_weights = _weights(_ROWS, row, len(rows), block.device)
            row += len(rows)
            at_a_time = max(1, limit // max(1, width))
            for part, weights in zip(rows.split(at_a_time), row_weights.split(at_a_time), strict=True):
                # A view as another dtype needs contiguous entries.
                in_words = part.to(dtype).contiguous().view(word)
                total += ((in_words * column_weights).sum(1) * weights).sum()
    return total


def read(sums: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the values of sums on one device, with one synchronization."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))


def sealed(total: int, dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return a tensor's digest from the sum over its blocks."""
    kind = f"{dtype} {tuple(shape)}".encode()
    return (total + int.from_bytes(hashlib.blake2b(kind, digest_size=8).digest())) & _ALL_BITS


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random int64 [count] for the positions from `start` on."""
    positions = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return splitmix64(positions * signed_64(GOLDEN_GAMMA) + signed_64(seed)) | 1


type Digests = Mapping[str, int | None]
"""Digests by Hugging Face name; None where only names are compared."""

_NAMED = 20
"""Maximum number of tensors named in a message."""
_OF_NO_TENSOR = -1


class IncompleteRefitError(RuntimeError):
    """After a refit an engine's weights differ from those sent."""


@dataclass(frozen=True)
class HeldBlock:
    """A block of a tensor held by one process of an engine; dtype, shape: of the whole tensor.

    corner, size: first row and column of the block, and their numbers, in the matrix view. total: its `block_sum`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    corner: tuple[int, int]
    size: tuple[int, int]
    total: int

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Build it from its fields, in which a serializer may have turned tuples into lists."""
        return cls(**{**message, **{name: tuple(message[name]) for name in ("shape", "corner", "size")}})


def require_as_sent(
    sent: Digests, held: Digests, *, unwritten: Iterable[str] = (), unreadable: Iterable[str] = ()
) -> None:
    """Raise IncompleteRefitError, naming tensors, unless the engine holds exactly the tensors sent, bit for bit.

    unwritten: its weights that were not loaded. unreadable: those that could not be compared, with reasons.
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
    wrong: list[str] = []
    for what, names in found.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        if names:
            wrong.append(f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}")
    if wrong:
        raise IncompleteRefitError(f"of {len(sent)} tensors " + "; ".join(wrong))


def of_all(sent: Digests) -> str:
    """Return one digest of all tensors, 16 hexadecimal digits; empty if one of them has no digest."""
    if None in sent.values():
        return ""
    lines = "".join(f"{name} {number}\n" for name, number in sorted(sent.items()))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def joined(processes: Iterable[Iterable[HeldBlock]]) -> dict[str, int]:
    """Return digests from an engine's blocks; an impossible one unless copies agree and cover the tensor."""
    blocks: dict[str, list[HeldBlock]] = {}
    for block in itertools.chain.from_iterable(processes):
        blocks.setdefault(block.name, []).append(block)
    found: dict[str, int] = {}
    for name, of_tensor in blocks.items():
        first = of_tensor[0]
        totals = {(block.corner, block.size): block.total for block in of_tensor}
        # Blocks are shards of one partition: any two are equal or disjoint.
        entries = sum(rows * columns for _, (rows, columns) in totals)
        whole = entries == torch.Size(first.shape).numel()
        alike = all(
            (block.dtype, block.shape) == (first.dtype, first.shape)
            and block.total == totals[block.corner, block.size]
            for block in of_tensor
        )
        digest = sealed(sum(totals.values()), getattr(torch, first.dtype), first.shape)
        found[name] = digest if whole and alike else _OF_NO_TENSOR
    return found
