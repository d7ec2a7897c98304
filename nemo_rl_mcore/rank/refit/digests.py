"""Digests of weights, to verify tensor by tensor that an engine holds the same bits as the trainer.

A tensor is read as a matrix of words. Its last dimension is the columns, all others together are the rows; a tensor of
one dimension has a single column. A word is an entry's bits as an integer; an entry of 64 bits is two words of 32. The
digest is, modulo 2^64, a hash of dtype and shape plus the sum over all words of

    row_weight[row] * column_weight[column] * word

The weights are odd pseudo-random numbers of 64 bits. So the sums over a tensor's blocks add up to the sum over the
whole, however it is cut and wherever the blocks are held, and the digest is the same on every device.

One wrong word always changes the digest. Two tensors that differ in more words have the same digest with a probability
of at most 2^-56, over the choice of the weights; if they differ only in sign bits, of at most 2^-41 for 16-bit and
2^-26 for 32-bit numbers. The weights are fixed and public: this detects faults, not forgery.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from nemo_rl_mcore.ops.sampling import GOLDEN_GAMMA, signed_64, splitmix64

_ALL_BITS = (1 << 64) - 1
_ROWS, _COLUMNS = 0x243F6A8885A308D3, 0x13198A2E03707344
"""Seeds of the two kinds of weights: digits of pi."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WORDS_AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Words in memory at a time, of eight bytes each: a core's cache, or 32 MiB on a GPU."""


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    digester = Digester()
    for name, tensor in tensors:
        digester.add(name, tensor)
    return digester.digests()


@dataclass
class Digester:
    """Computes digests of a stream of tensors, each first cast to the dtype `held_as`, except experts' biases."""

    held_as: str | None = None
    _sums: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _kinds: dict[str, tuple[torch.dtype, torch.Size]] = field(
        default_factory=dict[str, tuple[torch.dtype, torch.Size]]
    )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, which may change afterwards."""
        dtype = tensor.dtype
        if self.held_as is not None:
            # Cast here, since engines have no code for model families.
            from nemo_rl_mcore.models.weights import EXPERT_BIAS_NAME

            dtype = dtype if name.endswith(EXPERT_BIAS_NAME) else getattr(torch, self.held_as)
        self._sums[name] = block_sum(tensor, dtype=dtype)
        self._kinds[name] = dtype, tensor.shape

    def digests(self) -> dict[str, int]:
        """Return all digests, with one synchronization; the tensors were all on one device."""
        if not self._sums:
            return {}
        totals = zip(self._sums, torch.stack([*self._sums.values()]).tolist(), strict=True)
        return {name: sealed(total, *self._kinds[name]) for name, total in totals}


def block_sum(
    block: torch.Tensor, *, first_row: int = 0, first_column: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a block's contribution to its tensor's sum, int64 [] on the block's device, signed.

    first_row, first_column: the block's position in the whole tensor. dtype: the block is first cast to it.
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


def sealed(total: int, dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return a tensor's digest, from the sum over its blocks."""
    kind = f"{dtype} {tuple(shape)}".encode()
    return (total + int.from_bytes(hashlib.blake2b(kind, digest_size=8).digest())) & _ALL_BITS


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random int64 [count] for the positions from `start` on."""
    positions = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return splitmix64(positions * signed_64(GOLDEN_GAMMA) + signed_64(seed)) | 1


type Digests = Mapping[str, int | None]
"""Digests by Hugging Face name; None if only names are compared."""

_NAMED = 20
"""Maximum number of tensors named in a message."""
_OF_NO_TENSOR = -1


class IncompleteRefitError(RuntimeError):
    """An engine's weights differ from the refit's."""


@dataclass(frozen=True)
class HeldBlock:
    """A block of a tensor in one of an engine's processes; dtype, shape: the whole tensor's.

    corner, size: the block's first row and column in the matrix, and its numbers of rows and columns. total: its
    `block_sum`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    corner: tuple[int, int]
    size: tuple[int, int]
    total: int

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Build a block from its fields, whose tuples a serializer may have turned into lists."""
        return cls(**{**message, **{name: tuple(message[name]) for name in ("shape", "corner", "size")}})


def require_as_sent(
    sent: Digests, held: Digests, *, unwritten: Iterable[str] = (), unreadable: Iterable[str] = ()
) -> None:
    """Raise IncompleteRefitError, naming tensors, unless the engine holds exactly the tensors sent, bit for bit.

    unwritten: the engine's weights that were not loaded. unreadable: weights that could not be compared, with reasons.
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
    """Return one digest of all tensors, 16 hexadecimal digits; empty if a tensor has none."""
    if None in sent.values():
        return ""
    lines = "".join(f"{name} {number}\n" for name, number in sorted(sent.items()))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def joined(processes: Iterable[Iterable[HeldBlock]]) -> dict[str, int]:
    """Return the digests of an engine's tensors; an impossible one if blocks are missing or copies differ."""
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
