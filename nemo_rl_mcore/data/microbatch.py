"""Cut a batch into microbatches, and put what they give back into the batch's order.

Shapes: B rows of a microbatch, S its columns, N rows of the batch that are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict

Groups = list[list[int]]


@dataclass(frozen=True)
class Microbatch:
    """Rows that pass through the model together, each in a row of its own.

    rows: what losses read, tensors only. Rows after the first N are filling: all zero, their sample_mask too, so that
        they count in no sum.
    places: int64 [N], where the others stand in the batch.
    """

    rows: BatchedDataDict
    places: Tensor

    @property
    def input_ids(self) -> Tensor:
        """Return the tokens as the model takes them."""
        return self.to_model(self.rows["input_ids"])

    @property
    def padding(self) -> Tensor:
        """Return bool, of the shape of `input_ids`: true where there is no token."""
        columns = torch.arange(self.rows["input_ids"].shape[1], device=self.rows["input_ids"].device)
        return ~self.to_model(columns < self.rows["input_lengths"].unsqueeze(1))

    @property
    def whole(self) -> Microbatch:
        """Return what the ranks share of which each sees a part: itself, where each sees all of it."""
        return self

    @property
    def borders(self) -> tuple[int, ...]:
        """Return where the samples of a packed row begin and end; empty when every sample has a row of its own."""
        return ()

    def to_model(self, values_BS: Tensor) -> Tensor:
        """Lay values [B, S, ...] of the rows' positions out as the model takes the tokens.

        What belongs to a position's next token is shifted before: a layout may put another sample's token next.
        """
        return values_BS

    def from_model(self, values: Tensor) -> Tensor:
        """Lay values that the model gives out as `rows` are: [B, S, ...], 0 where no token is."""
        return values

    def to(self, device: torch.device) -> Self:
        """Return the microbatch on a device."""
        return replace(self, rows=self.rows.to(device), places=self.places.to(device))


class BatchingStrategy(Protocol):
    """How a batch becomes microbatches: which rows go together, and how they are laid out; no sample is parted."""

    def groups(self, data: BatchedDataDict) -> Groups:
        """Return the rows of each microbatch; every row is in exactly one."""
        ...

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        """Return a microbatch for each group; one for an empty group is filling alone, a sample of it at least."""
        ...


@dataclass(frozen=True)
class FixedRows:
    """Microbatches of `row_count` rows in the batch's order, filled up where the next sample does not fit.

    An episode of more rows is a microbatch of its own, and the others are filled up to as many. All have the batch's
    columns, rounded up to a multiple of `column_multiple`.
    """

    row_count: int
    column_multiple: int = 1
    rows_per_sample: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        """See `BatchingStrategy.groups`. Raises ValueError when a microbatch has fewer rows than a sample."""
        if self.row_count < self.rows_per_sample:
            raise ValueError(
                f"a microbatch of {self.row_count} rows has no room for a sample of {self.rows_per_sample}"
            )
        groups: Groups = []
        for sample in data.samples(self.rows_per_sample):
            if not groups or len(groups[-1]) + len(sample) > self.row_count:
                groups.append([])
            groups[-1].extend(sample)
        return groups

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        """See `BatchingStrategy.build`."""
        columns = round_up(data["input_ids"].shape[1], self.column_multiple)
        rows = max([self.row_count, *map(len, groups)])
        return [
            Microbatch(take_rows(data, group, rows, columns), torch.tensor(group, dtype=torch.long))
            for group in groups
        ]


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def take_rows(data: BatchedDataDict, places: Sequence[int], rows: int, columns: int) -> BatchedDataDict:
    """Return the tensors of the rows at `places`, cut or filled with zeros to [rows, columns, ...].

    Tensors that have no column for each token of `input_ids` keep their columns.
    """
    tensors = BatchedDataDict({key: value for key, value in data.items() if isinstance(value, Tensor)})
    length = tensors["input_ids"].shape[1]
    missing = rows - len(places)
    return BatchedDataDict(
        {
            key: _resize(value, missing, columns - length if _has_columns(value, length) else 0)
            for key, value in tensors.select_indices(places).items()
        }
    )


def in_batch_order(parts: Iterable[tuple[Tensor, Tensor]], rows: int, columns: int) -> Tensor:
    """Return [rows, columns, ...] from microbatches' (places, values [B, S, ...]): 0 where cut, filling dropped."""
    parts = [*parts]
    result = parts[0][1].new_zeros(rows, columns, *parts[0][1].shape[2:])
    for places, values in parts:
        kept = values[: len(places), :columns]
        result[places, : kept.shape[1]] = kept
    return result


def _has_columns(value: Tensor, length: int) -> bool:
    return value.ndim > 1 and value.shape[1] == length


def _resize(value: Tensor, more_rows: int, more_columns: int) -> Tensor:
    if more_columns:
        value = pad(value, (0, 0) * (value.ndim - 2) + (0, more_columns))
    return pad(value, (0, 0) * (value.ndim - 1) + (0, more_rows)) if more_rows else value
