"""Dynamic batching: samples of like length together, as many as a token budget takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Groups, Microbatch, take_rows
from nemo_rl_mcore.data.token_budget import TokenBudget


@dataclass(frozen=True)
class DynamicRows:
    """Microbatches of as many samples as fit the budget when padded to the longest row, longest samples first.

    A sample of several rows that is above the budget by itself is a microbatch of its own.
    """

    budget: TokenBudget
    rows_per_sample: int = 1

    def groups(self, data: BatchedDataDict) -> Groups:
        """See `BatchingStrategy.groups`."""
        lengths: list[int] = data["input_lengths"].tolist()
        groups: Groups = []
        columns = 0
        longest = {
            sample: max(lengths[row] for row in sample) for sample in data.samples(self.rows_per_sample)
        }
        # Longest first: what needs the most memory comes first, and the columns are known when a group begins.
        for sample in sorted(longest, key=lambda sample: -longest[sample]):
            if not groups or (len(groups[-1]) + len(sample)) * columns > self.budget.tokens:
                groups.append([])
                columns = self._columns(data, longest[sample])
            groups[-1].extend(sample)
        return groups

    def build(self, data: BatchedDataDict, groups: Groups) -> list[Microbatch]:
        """See `BatchingStrategy.build`."""
        return [self._microbatch(data, group) for group in groups]

    def _microbatch(self, data: BatchedDataDict, group: list[int]) -> Microbatch:
        places = torch.tensor(group, dtype=torch.long)
        longest = int(data["input_lengths"][places].max()) if group else 0
        rows = take_rows(data, group, max(len(group), self.rows_per_sample), self._columns(data, longest))
        return Microbatch(rows, places)

    def _columns(self, data: BatchedDataDict, longest: int) -> int:
        return self.budget.padded(longest, at_most=data["input_ids"].shape[1])
