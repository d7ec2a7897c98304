"""Episodes of one row, parted into several as an agent that edits its history parts them."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.driver.rollouts.transcript import RESPONSES, TURN_OF_TOKEN, WEIGHT_VERSIONS
from nemo_rl_mcore.errors import RefusedError

# What stands in the columns of tokens that a row did not sample.
_NOT_SAMPLED = {"token_mask": 0, "generation_logprobs": 0, WEIGHT_VERSIONS: -1, TURN_OF_TOKEN: 0}


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
