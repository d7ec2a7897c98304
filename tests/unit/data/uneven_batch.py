"""Batches of rows of given lengths, and what a cut makes of them."""

import torch

from nemo_rl_mcore.data import BatchedDataDict

COLUMNS = 7


def batch(lengths, columns=COLUMNS):
    """Rows whose tokens are all different and none is 0."""
    rows = len(lengths)
    real = torch.arange(columns) < torch.tensor(lengths, dtype=torch.long).view(rows, 1)
    return BatchedDataDict(
        input_ids=torch.arange(1, rows * columns + 1).view(rows, columns) * real,
        input_lengths=torch.tensor(lengths, dtype=torch.long),
        token_mask=real.float(),
        topk=real.unsqueeze(2) * torch.arange(1, rows * columns * 3 + 1).view(rows, columns, 3),
        sample_mask=torch.ones(rows),
        texts=[str(row) for row in range(rows)],
    )


def made(cut, data, empty=0):
    return cut.build(data, cut.groups(data) + [[]] * empty)
