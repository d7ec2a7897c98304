"""The batch that driver, workers and losses exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import batched, pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.errors import RefusedError

EPISODE = "episode_index"
"""int64 [B]: neighbouring rows with equal numbers are one episode; without this column each row is an episode."""

ROUTED_EXPERTS = "routed_experts"
"""Integers [B, S, L, K]: the K experts of each token in each of the L MoE layers; NO_ROUTE if unknown."""
NO_ROUTE = -1

PadValue = int | float | bool
Entries = Mapping[str, Any] | Iterable[tuple[str, Any]]


class BatchedDataDict(dict[str, Any]):
    """A dict of batch-first tensors and of lists with one python value per row.

    All values have equally many rows: an assignment that breaks this raises a ValueError with the key.
    Methods return a new batch and leave this one as it is.

    >>> import torch
    >>> batch = BatchedDataDict(input_ids=torch.zeros(2, 8, dtype=torch.long), answers=["4", "5"])
    >>> batch.slice(1, 2)["answers"]
    ['5']
    """

    def __init__(self, data: Entries = (), /, **entries: Any) -> None:
        super().__init__()
        self.update(data, **entries)

    def __setitem__(self, key: str, value: Any) -> None:
        is_column = isinstance(value, Tensor) and value.ndim > 0
        if not is_column and not isinstance(value, list):
            what = f"{key!r} must be a tensor with a batch dimension or a list with one value per row"
            raise RefusedError(what, code="no-column")
        rows = len(value)  # pyright: ignore[reportUnknownArgumentType]
        # All others have equally many rows, so that one is enough.
        other = next((other for other in self if other != key), None)
        if other is not None and (others := len(self[other])) != rows:
            raise RefusedError(f"{key!r} has {rows} rows, but {other!r} has {others}", code="row-counts")
        super().__setitem__(key, value)

    def update(self, *args: Any, **entries: Any) -> None:
        for key, value in dict(*args, **entries).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Entries) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def copy(self) -> Self:
        return type(self)(self)

    @property
    def size(self) -> int:
        """The number of rows; 0 when the batch has no entry."""
        return next((len(value) for value in self.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        return dict(self)

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda value: value.to(device) if isinstance(value, Tensor) else value)

    def slice(self, start: int, end: int) -> Self:
        """Return rows start <= row < end; raises ValueError for a range outside the batch."""
        if not 0 <= start <= end <= self.size:
            raise RefusedError(f"slice({start}, {end}) leaves a batch of {self.size} rows", code="slice")
        return self._map(lambda value: value[start:end])

    def select_indices(self, indices: Sequence[int] | Tensor) -> Self:
        """Return the rows at `indices` ([N] integers, repeats allowed); raises ValueError for a boolean mask."""
        if isinstance(indices, Tensor) and indices.dtype == torch.bool:
            what = "select_indices takes row numbers; for a boolean mask pass mask.nonzero().flatten()"
            raise ValueError(what)
        index = torch.as_tensor(indices, dtype=torch.long).cpu()
        rows: list[int] = index.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

        def select(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.index_select(0, index.to(value.device))
            return [value[row] for row in rows]

        return self._map(select)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times (a a b b ...)."""
        return self.select_indices(torch.arange(self.size).repeat_interleave(num_repeats))

    def without(self, key: str) -> Self:
        return type(self)({other: value for other, value in self.items() if other != key})

    def samples(self, rows_per_sample: int = 1) -> list[range]:
        """Return each sample's rows, in order. A sample is an episode, or the rows that a loss compares.

        Raises ValueError for an incomplete sample, for an episode whose rows are not neighbours, and for
        `episode_index` beside a loss that compares rows.
        """
        if EPISODE not in self:
            if rows_per_sample < 1 or self.size % rows_per_sample:
                what = f"{self.size} rows cannot be divided into samples of {rows_per_sample} rows"
                raise RefusedError(what, code="rows-per-sample")
            return [range(row, row + rows_per_sample) for row in range(0, self.size, rows_per_sample)]
        if rows_per_sample != 1:
            what = f"{EPISODE} with samples of {rows_per_sample} rows each, which cannot be episodes"
            raise RefusedError(what, code="rows-per-sample")
        numbers: list[int] = self[EPISODE].tolist()
        starts = [row for row, number in enumerate(numbers) if row == 0 or number != numbers[row - 1]]
        if len(starts) != len(set(numbers)):
            what = f"{EPISODE}: rows of one episode do not stand together"
            raise RefusedError(what, code="episode-apart")
        return [range(start, stop) for start, stop in pairwise([*starts, self.size])]

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, rows_per_sample: int = 1
    ) -> list[Self]:
        """Split the rows into `shards` equal batches of whole samples, in order; an episode counts as one row.

        `batch_size` is the rows of an optimizer step: each group of that many rows is split separately, so that step k
        trains on the same rows for any number of shards. Raises ValueError where a division has a remainder.
        """
        samples = self.samples(rows_per_sample)
        rows, unit = len(samples) * rows_per_sample, "episodes" if EPISODE in self else "rows"
        batch_size = rows if batch_size is None else batch_size
        if shards < 1 or batch_size < 0 or batch_size % shards:
            what = f"{batch_size} {unit} do not split into {shards} equal shards"
            raise RefusedError(what, code="equal-shards")
        if batch_size // shards % rows_per_sample:
            what = f"{batch_size} rows, {rows_per_sample} a sample, do not split into {shards} equal shards"
            raise RefusedError(what, code="equal-shards")
        if batch_size and rows % batch_size:
            what = f"{rows} {unit} do not split into batches of {batch_size}"
            raise RefusedError(what, code="equal-batches")
        shares: list[list[int]] = [[] for _ in range(shards)]
        for step in batched(samples, batch_size // rows_per_sample) if batch_size else ():
            for share, own in zip(shares, batched(step, len(step) // shards), strict=True):
                share += [row for sample in own for row in sample]
        return [self.select_indices(share) for share in shares]

    def split(self, shards: int, rows_per_sample: int = 1) -> list[Self]:
        """Split the samples into `shards` batches, in order, whose sizes differ by at most one; some may be empty."""
        if shards < 1:
            raise RefusedError(f"{self.size} rows do not split into {shards} batches", code="equal-batches")
        samples = self.samples(rows_per_sample)
        bounds = pairwise(len(samples) * shard // shards for shard in range(shards + 1))
        return [
            self.select_indices([row for sample in samples[start:stop] for row in sample])
            for start, stop in bounds
        ]

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, PadValue] | None = None
    ) -> Self:
        """Concatenate batches by rows; tensors are padded on the right of dimension 1, with 0 or `pad_value_dict[key]`.

        Episodes are renumbered, so that those of different batches stay apart.
        Raises ValueError with the key where a batch lacks a key or another dimension differs.
        """
        if not batches:
            raise RefusedError("from_batches needs at least one batch", code="no-batch")
        for key in {key for batch in batches for key in batch}:
            missing = [i for i, batch in enumerate(batches) if key not in batch]
            if missing:
                raise ValueError(f"{key!r} is missing from batches {missing} of {len(batches)}")
        pads = pad_value_dict or {}
        whole = cls(
            (key, _concatenate(key, [b[key] for b in batches], pads.get(key, 0))) for key in batches[0]
        )
        if EPISODE in whole:
            parts, following = [batches[0][EPISODE][:0]], 0
            for numbers in (batch[EPISODE] for batch in batches):
                if len(numbers):
                    parts.append(numbers - numbers.min() + following)
                    following = int(parts[-1].max()) + 1
            whole[EPISODE] = torch.cat(parts)
        return whole

    def _map(self, change: Callable[[Any], Any]) -> Self:
        """Return a batch of changed values, which are not checked again."""
        batch = type(self)()
        dict[str, Any].update(batch, {key: change(value) for key, value in self.items()})
        return batch


def _concatenate(key: str, values: list[Any], pad_value: PadValue) -> Any:
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, Tensor) for value in values):
        raise ValueError(f"{key!r} is a tensor in some batches and a list in others")
    if len({(value.ndim, value.shape[2:]) for value in values}) > 1:
        shapes = [tuple(value.shape) for value in values]
        raise ValueError(f"{key!r} has shapes {shapes}; only the first two dimensions may differ")
    if values[0].ndim < 2:
        return torch.cat(values)
    longest = max(value.shape[1] for value in values)
    # pad() takes the sizes of the last dimension first.
    behind = [(0, 0) * (value.ndim - 2) + (0, longest - value.shape[1]) for value in values]
    return torch.cat([pad(value, more, value=pad_value) for value, more in zip(values, behind, strict=True)])


def digest_of_ids(ids: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the first 8 bytes of blake2b over the ids as little-endian int64, as an int64."""
    found = hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8)
    return int.from_bytes(found.digest(), "little", signed=True)


def digests_of_rows(tokens_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return `digest_of_ids` of each row's first `lengths_B` tokens, int64 [B]; every tensor is int64 on the CPU."""
    lengths: list[int] = lengths_B.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    rows = zip(tokens_BT.numpy(), lengths, strict=True)
    return torch.tensor([digest_of_ids(ids[:length]) for ids, length in rows], dtype=torch.long)
