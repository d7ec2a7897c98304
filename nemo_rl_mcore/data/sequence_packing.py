"""Sequence packing: several samples one after the other in a single row, without padding between them.

Losses never learn of it: they read the samples as rows [B, S], and what the model says of the packed row's L tokens is
laid out like that before they see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Groups, Microbatch, round_up, take_rows
from nemo_rl_mcore.data.token_budget import TokenBudget
from nemo_rl_mcore.errors import RefusedError


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Groups:
    """Return bins of indices whose lengths add up to at most `capacity`.

    The longest first, each goes into the first bin with room; equal ones in the order given. Raises ValueError when a
    length alone is above the capacity.
    """
    bins: Groups = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            raise RefusedError(f"a length of {length} does not fit a capacity of {capacity}", code="capacity")
        place = next((place for place, left in enumerate(room) if length <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    return bins


@dataclass(frozen=True)
class PackedMicrobatch(Microbatch):
    """Rows that pass through the model as one.

    sources: int64, where each token of the packed row stands in the flattened [B, S] rows; padding follows them.
    lengths: the tokens of each row of `rows`, with the padding after them.
    columns: L, the length of the packed row.
    """

    sources: Tensor
    lengths: tuple[int, ...]
    columns: int

    @property
    def borders(self) -> tuple[int, ...]:
        """0, the end of each sample, and L; what padding follows the samples stands alone too."""
        ends = accumulate(length for length in self.lengths if length)
        padding = (self.columns,) if len(self.sources) < self.columns else ()
        return (0, *ends, *padding)

    def to_model(self, values_BS: Tensor) -> Tensor:
        """[B, S, ...] to [1, L, ...], 0 on the padding."""
        packed = values_BS.flatten(0, 1).index_select(0, self.sources)
        behind = (0, 0) * (packed.ndim - 1) + (0, self.columns - len(self.sources))
        return pad(packed, behind).unsqueeze(0)

    def from_model(self, values: Tensor) -> Tensor:
        """[1, L, ...] to [B, S, ...], 0 where no token is; gradients flow back."""
        rows, columns = self.rows["input_ids"].shape
        flat = values.new_zeros(rows * columns, *values.shape[2:])
        return flat.index_copy(0, self.sources, values[0, : len(self.sources)]).view(
            rows, columns, *values.shape[2:]
        )

    def to(self, device: torch.device) -> Self:
        """Return the microbatch on a device."""
        return replace(super().to(device), sources=self.sources.to(device))


@dataclass(frozen=True)
class PackedRows:
    """Microbatches of one row each, packed by first-fit decreasing up to the budget.

    A sample of several rows that is above the budget by itself raises the budget of its batch.
    equal_columns: pad all packed rows of a batch to the longest of them, as pipeline stages need it.
    row_multiple: pad each row in them to a multiple of so many tokens, as context parallelism needs it.
    """

    budget: TokenBudget
    equal_columns: bool = False
    rows_per_sample: int = 1
    row_multiple: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        """See `BatchingStrategy.groups`."""
        lengths = self._padded(data["input_lengths"].tolist())
        samples = data.samples(self.rows_per_sample)
        tokens = [sum(lengths[row] for row in sample) for sample in samples]
        bins = first_fit_decreasing(tokens, max(self.budget.tokens, *tokens, 0))
        return [[row for sample in packed for row in samples[sample]] for packed in bins]

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        """See `BatchingStrategy.build`."""
        # An empty group is a sample of filling, for losses to have something to read.
        filling = (0,) * self.rows_per_sample
        lengths = [tuple(self._padded(data["input_lengths"][group].tolist())) or filling for group in groups]
        columns = [self.budget.padded(sum(of_group)) for of_group in lengths]
        if self.equal_columns:
            columns = [max(columns)] * len(columns)
        return [_packed(data, *microbatch) for microbatch in zip(groups, lengths, columns, strict=True)]

    def _padded(self, lengths: list[int]) -> list[int]:
        return [round_up(length, self.row_multiple) for length in lengths]


def _packed(data: BatchedDataDict, group: list[int], lengths: tuple[int, ...], columns: int) -> Microbatch:
    row_columns = max(*lengths, 1)
    real = torch.arange(row_columns) < torch.tensor(lengths).unsqueeze(1)
    return PackedMicrobatch(
        rows=take_rows(data, group, len(lengths), row_columns),
        places=torch.tensor(group, dtype=torch.long),
        sources=real.flatten().nonzero().flatten(),
        lengths=lengths,
        columns=columns,
    )
