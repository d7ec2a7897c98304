"""Split a batch into microbatches, and put their results back into the batch's order.

Each of three layouts has `groups`, the rows of each microbatch (every row in exactly one, whole samples), and `build`,
a microbatch for each group; for an empty group it consists of filling, at least one sample.

Shapes: B rows and S columns of a microbatch, N rows of the batch in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.errors import RefusedError

Groups = list[list[int]]


@dataclass(frozen=True)
class Microbatch:
    """Rows that pass through the model together, unpacked.

    rows: the tensors that losses read. Rows after the first N are filling: all zero, with their sample_mask, so that
        they count in no sum.
    places: int64 [N], the first N rows' places in the batch.
    """

    rows: BatchedDataDict
    places: Tensor

    @property
    def input_ids(self) -> Tensor:
        """The tokens in the model's layout."""
        return self.to_model(self.rows["input_ids"])

    @property
    def padding(self) -> Tensor:
        """Bool, shaped as `input_ids`: true where there is no token."""
        columns = torch.arange(self.rows["input_ids"].shape[1], device=self.rows["input_ids"].device)
        return ~self.to_model(columns < self.rows["input_lengths"].unsqueeze(1))

    @property
    def whole(self) -> Microbatch:
        """The undivided microbatch if each rank holds only a part of it; otherwise this one."""
        return self

    @property
    def borders(self) -> tuple[int, ...]:
        """Starts and ends of the samples in a packed row; empty for unpacked rows."""
        return ()

    def to_model(self, values_BS: Tensor) -> Tensor:
        """Bring values [B, S, ...] into the model's layout.

        Values for a position's next token must be shifted first: a layout may put another sample's token next.
        """
        return values_BS

    def from_model(self, values: Tensor) -> Tensor:
        """Bring the model's values into the layout of `rows`: [B, S, ...], 0 where there is no token."""
        return values

    def to(self, device: torch.device) -> Self:
        values = vars(self).items()
        moved = {key: one.to(device) for key, one in values if isinstance(one, Tensor | BatchedDataDict)}
        return replace(self, **moved)


@dataclass(frozen=True)
class FixedRows:
    """Microbatches of `row_count` rows in the batch's order, filled up if the next sample does not fit.

    An episode with more rows is a microbatch of its own; all others are then filled up to as many rows. All have the
    batch's columns, rounded up to a multiple of `column_multiple`.
    """

    row_count: int
    column_multiple: int = 1
    rows_per_sample: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        """Raise ValueError for a sample of more rows than a microbatch."""
        if self.row_count < self.rows_per_sample:
            what = f"a microbatch of {self.row_count} rows has no room for a sample of {self.rows_per_sample}"
            raise ValueError(what)
        groups: Groups = []
        for sample in data.samples(self.rows_per_sample):
            if not groups or len(groups[-1]) + len(sample) > self.row_count:
                groups.append([])
            groups[-1].extend(sample)
        return groups

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        columns = round_up(data["input_ids"].shape[1], self.column_multiple)
        rows = max([self.row_count, *map(len, groups)])
        microbatches = list[Microbatch]()
        for group in groups:
            places = torch.tensor(group, dtype=torch.long)
            microbatches.append(Microbatch(take_rows(data, group, rows, columns), places))
        return microbatches


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def take_rows(data: BatchedDataDict, places: Sequence[int], rows: int, columns: int) -> BatchedDataDict:
    """Return the tensors of the rows at `places`, cut or zero-filled to [rows, columns, ...].

    Tensors without a column for each token of `input_ids` keep their columns.
    """
    tensors = BatchedDataDict({key: value for key, value in data.items() if isinstance(value, Tensor)})
    length = tensors["input_ids"].shape[1]
    missing = rows - len(places)
    taken = BatchedDataDict()
    for key, value in tensors.select_indices(places).items():
        if value.ndim > 1 and value.shape[1] == length != columns:
            value = pad(value, (0, 0) * (value.ndim - 2) + (0, columns - length))
        taken[key] = pad(value, (0, 0) * (value.ndim - 1) + (0, missing)) if missing else value
    return taken


def in_batch_order(parts: Iterable[tuple[Tensor, Tensor]], rows: int, columns: int) -> Tensor:
    """Combine microbatches' (places, values [B, S, ...]) into [rows, columns, ...]: 0 where cut, filling dropped."""
    parts = [*parts]
    result = parts[0][1].new_zeros(rows, columns, *parts[0][1].shape[2:])
    for places, values in parts:
        kept = values[: len(places), :columns]
        result[places, : kept.shape[1]] = kept
    return result


@dataclass(frozen=True)
class TokenBudget:
    """A microbatch's tokens; longer rows are refused earlier, by `data.validation`.

    length_round: padded lengths are rounded up to a multiple of this if the budget has room, so that few shapes occur.
    column_multiple: a multiple that the layout needs; rounding up to it may exceed the budget.
    """

    tokens: int
    length_round: int = 1
    column_multiple: int = 1

    def padded(self, length: int, *, at_most: int | None = None) -> int:
        """Return the padded length: at most `at_most` and the budget, but never below `length`."""
        limit = self.tokens if at_most is None else min(self.tokens, at_most)
        rounded = min(round_up(max(length, 1), self.length_round), max(limit, length))
        return round_up(rounded, self.column_multiple)


def balanced(lengths: Sequence[int], shards: int) -> Groups:
    """Assign samples to shards: about equally many tokens, and numbers of samples that differ by at most one.

    lengths: each sample's tokens. The longest remaining one goes to the shard with the fewest tokens that has room.
    """
    least, more = divmod(len(lengths), shards)
    room = [least + (shard < more) for shard in range(shards)]
    shares: Groups = [[] for _ in room]
    open_shards = [(0, shard) for shard in range(shards) if room[shard]]  # a heap, by their tokens
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        tokens, emptiest = heappop(open_shards)
        shares[emptiest].append(sample)
        if len(shares[emptiest]) < room[emptiest]:
            heappush(open_shards, (tokens + lengths[sample], emptiest))
    return shares


def split_balanced(data: BatchedDataDict, shards: int, rows_per_sample: int = 1) -> list[BatchedDataDict]:
    """Split a batch like `BatchedDataDict.split`, into shards of about equally many tokens."""
    samples, lengths = data.samples(rows_per_sample), data["input_lengths"].tolist()
    shares = balanced([sum(lengths[row] for row in sample) for sample in samples], shards)
    return [data.select_indices([row for sample in shard for row in samples[sample]]) for shard in shares]


@dataclass(frozen=True)
class DynamicRows:
    """Microbatches of as many samples as fit the budget, padded to the longest row, longest samples first.

    A sample of several rows above the budget is a microbatch of its own.
    """

    budget: TokenBudget
    rows_per_sample: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        lengths: list[int] = data["input_lengths"].tolist()
        groups: Groups = []
        columns = 0
        samples = data.samples(self.rows_per_sample)
        longest = {sample: max(lengths[row] for row in sample) for sample in samples}
        # Longest first: memory peaks at once, and a group's columns are known from its first sample.
        for sample in sorted(longest, key=lambda sample: -longest[sample]):
            if not groups or (len(groups[-1]) + len(sample)) * columns > self.budget.tokens:
                groups.append([])
                columns = self.budget.padded(longest[sample], at_most=data["input_ids"].shape[1])
            groups[-1].extend(sample)
        return groups

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        microbatches, most = list[Microbatch](), data["input_ids"].shape[1]
        for group in groups:
            places = torch.tensor(group, dtype=torch.long)
            longest = int(data["input_lengths"][places].max()) if group else 0
            columns = self.budget.padded(longest, at_most=most)
            rows = take_rows(data, group, max(len(group), self.rows_per_sample), columns)
            microbatches.append(Microbatch(rows, places))
        return microbatches


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Groups:
    """Return bins of indices whose lengths add up to at most `capacity`; raises ValueError for a length above it.

    Indices are placed longest first, ties in the given order, each into the first bin with room.
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
    """Rows that pass through the model as one, without padding between them.

    Losses are unaffected: the model's values for the packed row's L tokens are first unpacked into rows.

    sources: int64, each packed token's place in the flattened [B, S] rows; padding follows.
    lengths: tokens of each row of `rows`, with the padding behind them.
    columns: L, the packed row's length.
    """

    sources: Tensor
    lengths: tuple[int, ...]
    columns: int

    @property
    def borders(self) -> tuple[int, ...]:
        """0, the end of each sample, and L; padding behind the samples counts as a sample."""
        ends = accumulate(length for length in self.lengths if length)
        padding = (self.columns,) if len(self.sources) < self.columns else ()
        return (0, *ends, *padding)

    def to_model(self, values_BS: Tensor) -> Tensor:
        """[B, S, ...] to [1, L, ...], 0 on the padding."""
        packed = values_BS.flatten(0, 1).index_select(0, self.sources)
        behind = (0, 0) * (packed.ndim - 1) + (0, self.columns - len(self.sources))
        return pad(packed, behind).unsqueeze(0)

    def from_model(self, values: Tensor) -> Tensor:
        """[1, L, ...] to [B, S, ...], 0 where there is no token; gradients flow back."""
        rows, columns = self.rows["input_ids"].shape
        flat = values.new_zeros(rows * columns, *values.shape[2:])
        laid_out = flat.index_copy(0, self.sources, values[0, : len(self.sources)])
        return laid_out.view(rows, columns, *values.shape[2:])


@dataclass(frozen=True)
class PackedRows:
    """Microbatches of one packed row each, by first-fit decreasing up to the budget.

    A sample of several rows above the budget raises its batch's budget.
    equal_columns: pad a batch's packed rows to the longest of them, for pipeline stages.
    row_multiple: pad each row in them to a multiple of this many tokens, for context parallelism.
    """

    budget: TokenBudget
    equal_columns: bool = False
    rows_per_sample: int = 1
    row_multiple: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        lengths = [round_up(length, self.row_multiple) for length in data["input_lengths"].tolist()]
        samples = data.samples(self.rows_per_sample)
        tokens = [sum(lengths[row] for row in sample) for sample in samples]
        bins = first_fit_decreasing(tokens, max(self.budget.tokens, *tokens, 0))
        return [[row for sample in packed for row in samples[sample]] for packed in bins]

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        # An empty group gets a sample of filling, so that losses have something to read.
        filling = (0,) * self.rows_per_sample
        lengths = [
            tuple(round_up(length, self.row_multiple) for length in data["input_lengths"][group].tolist())
            or filling
            for group in groups
        ]
        columns = [self.budget.padded(sum(of_group)) for of_group in lengths]
        if self.equal_columns:
            columns = [max(columns)] * len(columns)
        microbatches = list[Microbatch]()
        for group, of_group, packed in zip(groups, lengths, columns, strict=True):
            row_columns, places = max(*of_group, 1), torch.tensor(group, dtype=torch.long)
            real = torch.arange(row_columns) < torch.tensor(of_group).unsqueeze(1)
            rows = take_rows(data, group, len(of_group), row_columns)
            sources = real.flatten().nonzero().flatten()
            microbatches.append(PackedMicrobatch(rows, places, sources, of_group, packed))
        return microbatches
