"""Dynamic batching: rows of like length together, as many as a token budget takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Groups, Microbatch, take_rows
from nemo_rl_mcore.data.token_budget import TokenBudget


@dataclass(frozen=True)
class DynamicRows:
    """Microbatches of as many rows as fit the budget when padded to the longest of them, longest rows first."""

    budget: TokenBudget

    def groups(self, data: BatchedDataDict) -> Groups:
        """See `Cut.groups`."""
        lengths = self.budget.row_lengths(data)
        groups: Groups = []
        columns = 0
        # Longest first: what needs the most memory comes first, and a row's columns are known when its group begins.
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if not groups or (len(groups[-1]) + 1) * columns > self.budget.tokens:
                groups.append([])
                columns = self._columns(data, lengths[row])
            groups[-1].append(row)
        return groups

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        """See `Cut.build`."""
        return [self._microbatch(data, group) for group in groups]

    def _microbatch(self, data: BatchedDataDict, group: list[int]) -> Microbatch:
        places = torch.tensor(group, dtype=torch.long)
        longest = int(data["input_lengths"][places].max()) if group else 0
        rows = take_rows(data, group, max(len(group), 1), self._columns(data, longest))
        return Microbatch(rows, places)

    def _columns(self, data: BatchedDataDict, longest: int) -> int:
        return self.budget.padded(longest, at_most=data["input_ids"].shape[1])
