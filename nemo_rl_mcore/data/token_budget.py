"""How many tokens a microbatch may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.microbatch import Groups, round_up


@dataclass(frozen=True)
class TokenBudget:
    """A number of tokens; `data.validation` has refused rows that are longer.

    length_round: padded lengths are rounded up to a multiple of this where the budget has room, so that few different
        shapes occur.
    column_multiple: what the layout cuts a padded length into; rounding up to it may pass the budget.
    """

    tokens: int
    length_round: int = 1
    column_multiple: int = 1

    def padded(self, length: int, *, at_most: int | None = None) -> int:
        """Return what `length` tokens are padded to; not beyond `at_most`, or the budget if that is less.

        What is above the budget, as a sample of several rows may be, is not rounded up.
        """
        limit = self.tokens if at_most is None else min(self.tokens, at_most)
        rounded = min(round_up(max(length, 1), self.length_round), max(limit, length))
        return round_up(rounded, self.column_multiple)


def balanced(lengths: Sequence[int], shards: int) -> Groups:
    """Return the samples of each shard: about equally many tokens, and as many samples but for one.

    lengths: tokens of each sample. The longest that is left goes to the shard with the fewest tokens that is not full.
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
    """As `BatchedDataDict.split`, but so that the shards hold about equally many tokens."""
    samples, lengths = data.samples(rows_per_sample), data["input_lengths"].tolist()
    shares = balanced([sum(lengths[row] for row in sample) for sample in samples], shards)
    return [data.select_indices([row for sample in shard for row in samples[sample]]) for shard in shares]
