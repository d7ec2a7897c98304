import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import make_microbatches


def batch(rows, columns=5):
    return BatchedDataDict(
        input_ids=torch.arange(1, rows * columns + 1).view(rows, columns),
        token_mask=torch.ones(rows, columns),
        topk=torch.ones(rows, columns, 3),
        sample_mask=torch.ones(rows),
        texts=[str(row) for row in range(rows)],
    )


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_equal_shapes_that_hold_every_row_once(rows, multiple):
    made = make_microbatches(batch(rows), 3, multiple)
    columns = -(-5 // multiple) * multiple
    assert len(made) == max(1, -(-rows // 3))
    assert {tuple(part["input_ids"].shape) for part in made} == {(3, columns)}
    assert {tuple(part["topk"].shape) for part in made} == {(3, columns, 3)}
    together = torch.cat([part["input_ids"] for part in made])
    assert torch.equal(together[:rows, :5], batch(rows)["input_ids"])
    assert together[rows:].abs().sum() == 0
    assert torch.cat([part["sample_mask"] for part in made]).sum() == rows
    assert torch.cat([part["token_mask"] for part in made]).sum() == rows * 5
    assert all("texts" not in part for part in made)
