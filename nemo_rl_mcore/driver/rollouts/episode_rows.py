"""Episodes that are several rows of a batch, as one row each, and rows parted into several.

Rows are several where a context is compacted or branches: see docs/losses_and_advantages.md.
Shapes: B rows, S columns; E episodes, of R rows at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.turns import Ending
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES, TURN_OF_TOKEN, WEIGHT_VERSIONS
from nemo_rl_mcore.errors import RefusedError

ENDING = "ending"
# What stands in the columns of tokens that a row did not sample.
_NOT_SAMPLED = {"token_mask": 0, "generation_logprobs": 0, WEIGHT_VERSIONS: -1, TURN_OF_TOKEN: 0}


def dropped_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B]: the rows of episodes of which the environment said nothing; none without `ending`."""
    return batch[ENDING] == Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def uncounted_rows(batch: BatchedDataDict) -> Tensor:
    """Return bool [B]: the rows of episodes that are dropped or not scored; none without `ending`."""
    return batch[ENDING] >= Ending.DROPPED if ENDING in batch else torch.zeros(batch.size, dtype=torch.bool)


def first_rows(batch: BatchedDataDict) -> list[int]:
    """Return the first row of each episode, those that do not count too."""
    return [rows.start for rows in batch.samples()]


@dataclass(frozen=True)
class EpisodeRows:
    """Says where in a batch of B `rows` the episodes stand that count: all but those dropped or not scored.

    first: int64 [E], the first row of each. at: int64 [3, N], for each of their N rows the row, the episode's number
    and the row's place in it.
    """

    rows: int
    first: Tensor
    at: Tensor

    @classmethod
    def of(cls, batch: BatchedDataDict) -> Self:
        """Read `episode_index` and `ending` [B]; without them each row is an episode, and all count.

        Raises ValueError for rows of an episode that stand apart.
        """
        first = torch.tensor(first_rows(batch), dtype=torch.int64)
        counted = ~uncounted_rows(batch)[first]
        of_row = torch.zeros(batch.size, dtype=torch.int64).index_fill(0, first, 1).cumsum(0) - 1
        row = counted[of_row].nonzero().squeeze(1)
        episode = of_row[row]
        number = counted.cumsum(0)[episode] - 1
        return cls(batch.size, first[counted], torch.stack([row, number, row - first[episode]]))

    def one_each(self, values_B: Tensor) -> Tensor:
        """Return [E, ...], what stands on the first row of each."""
        return values_B[self.first]

    def joined(self, values_BS: Tensor, fill: float = 0) -> Tensor:
        """Return [E, R * S], the rows of each one after the other, then `fill`."""
        row, number, place = self.at
        joined = values_BS.new_full((len(self.first), self._most_rows, values_BS.shape[1]), fill)
        joined[number, place] = values_BS[row]
        return joined.flatten(1)

    def parted(self, values_ES: Tensor) -> Tensor:
        """Return [B, S], what `joined` has put together; 0 on the rows of episodes that do not count."""
        row, number, place = self.at
        parts = values_ES.reshape(len(self.first), self._most_rows, values_ES.shape[1] // self._most_rows)
        parted = values_ES.new_zeros(self.rows, parts.shape[2])
        parted[row] = parts[number, place]
        return parted

    def total(self, values_B: Tensor) -> Tensor:
        """Return [E], the sum over the rows of each."""
        return self.joined(values_B.unsqueeze(1)).sum(1)

    def on_rows(self, values_E: Tensor) -> Tensor:
        """Return [B], the value of its episode on each row; 0 where that does not count."""
        row, number, _place = self.at
        values_B = values_E.new_zeros(self.rows)
        values_B[row] = values_E[number]
        return values_B

    @property
    def _most_rows(self) -> int:
        """R, 1 where no episode is left."""
        return int(self.at[2].max()) + 1 if self.at.numel() else 1


def as_rows(batch: BatchedDataDict, cuts: Sequence[Sequence[int]]) -> BatchedDataDict:
    """Part each row at its own columns, in order, into rows of one episode; no cut leaves it whole.

    A part repeats all tokens before it, and has as sampled those from the cut before on: each token is in one of them.
    What else a row has of its tokens and of itself stands on all of its parts. Columns after a part's input_lengths
    keep their ids. Raises ValueError for cuts that do not ascend inside the row.
    """
    bounds: list[tuple[int, int, int]] = []
    for row, (length, columns) in enumerate(zip(batch["input_lengths"].tolist(), cuts, strict=True)):
        ends = [*columns, length]
        if not all(start < end for start, end in pairwise([0, *ends])):
            raise RefusedError(
                f"row {row} of {length} tokens cannot be cut at {list(columns)}: allowed are 1 to "
                f"{length - 1}, ascending",
                code="row-cuts",
            )
        bounds += [(row, start, end) for start, end in pairwise([0, *ends])]
    rows, starts, ends = torch.tensor(bounds, dtype=torch.int64).view(-1, 3).t()
    parts = batch.select_indices(rows)
    parts.pop(RESPONSES, None)  # of the whole row
    parts[EPISODE] = batch.get(EPISODE, torch.arange(batch.size))[rows]
    parts["input_lengths"] = ends
    columns = torch.arange(parts["input_ids"].shape[1])
    own_BS = (columns >= starts.unsqueeze(1)) & (columns < ends.unsqueeze(1))
    for key, absent in _NOT_SAMPLED.items():
        if key in parts:
            parts[key] = parts[key].masked_fill(~own_BS, absent)
    return parts
