"""How many tokens a microbatch may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.microbatch import round_up


@dataclass(frozen=True)
class TokenBudget:
    """A number of tokens, and the configuration key that says it.

    length_round: padded lengths are rounded up to a multiple of this where the budget has room, so that few different
        shapes occur.
    column_multiple: what the layout cuts a padded length into; rounding up to it may pass the budget.
    """

    tokens: int
    key: str
    length_round: int = 1
    column_multiple: int = 1

    def padded(self, length: int, *, at_most: int | None = None) -> int:
        """Return what `length` tokens are padded to; not beyond `at_most`, if that is below the budget."""
        limit = self.tokens if at_most is None else min(self.tokens, at_most)
        rounded = min(round_up(max(length, 1), self.length_round), limit)
        return round_up(rounded, self.column_multiple)

    def row_lengths(self, data: BatchedDataDict) -> list[int]:
        """Return how many tokens each row has.

        Raises ValueError when a row has more than the budget or than the batch has columns, and when tokens count that
        stand behind a row's length: they would be cut off.
        """
        if "input_lengths" not in data:
            raise ValueError(
                f"the batch has no 'input_lengths', which {self.key} needs; it has {sorted(data)}"
            )
        columns = data["input_ids"].shape[1]
        lengths: list[int] = data["input_lengths"].tolist()
        if wrong := [length for length in lengths if not 0 <= length <= columns]:
            raise ValueError(f"input_lengths {wrong} are outside 0 to {columns}, the columns of input_ids")
        if longer := [length for length in lengths if length > self.tokens]:
            raise ValueError(f"rows of {longer} tokens are longer than {self.key}: {self.tokens}")
        self._require_mask_within(data, columns)
        return lengths

    def _require_mask_within(self, data: BatchedDataDict, columns: int) -> None:
        if "token_mask" not in data:
            return
        behind = torch.arange(columns) >= data["input_lengths"].unsqueeze(1)
        rows = (behind & data["token_mask"].bool()).any(dim=1).nonzero().flatten()
        if len(rows):
            raise ValueError(
                f"token_mask marks tokens behind input_lengths in rows {rows.tolist()}; {self.key} cuts them off"
            )


def balanced_order(lengths: Sequence[int], shards: int) -> list[int]:
    """Return the rows in an order whose `shards` equal runs hold about equally many tokens.

    The longest row that is left goes to the run with the fewest tokens that is not full.
    Raises ValueError when the rows do not split into equal runs.
    """
    if shards < 1 or len(lengths) % shards:
        raise ValueError(f"{len(lengths)} rows do not split into {shards} equal shards")
    runs: list[list[int]] = [[] for _ in range(shards)]
    tokens = [0] * shards
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        open_runs = (run for run in range(shards) if len(runs[run]) < len(lengths) // shards)
        emptiest = min(open_runs, key=lambda run: tokens[run])
        runs[emptiest].append(row)
        tokens[emptiest] += lengths[row]
    return [row for run in runs for row in run]
