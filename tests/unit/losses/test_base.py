import math
from collections.abc import Callable

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import (
    Masks,
    MetricKind,
    MetricSum,
    divide,
    masked_sum,
    normalize,
    require,
    valid_counts,
)

BatchMaker = Callable[..., tuple[torch.Tensor, BatchedDataDict]]


def masks(token_mask: list[list[int]], sample_mask: list[float]) -> Masks:
    data = BatchedDataDict(token_mask=torch.tensor(token_mask), sample_mask=torch.tensor(sample_mask))
    return Masks.of(data, torch.float64)


VALUES = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]], dtype=torch.float64)
EXAMPLE = masks([[0, 1, 1], [1, 0, 1], [1, 1, 1]], [1, 1, 0])


def test_a_masked_sum_is_blind_to_what_is_masked():
    values = torch.tensor([3.0, math.nan, 5.0], dtype=torch.float64)
    mask = torch.tensor([1, 0, 1])
    assert masked_sum(values, mask).item() == 8
    assert masked_sum(values, 0 * mask).item() == 0


def test_a_mean_adds_epsilon_to_the_count():
    eight = {"x": MetricSum(torch.tensor(8.0, dtype=torch.float64), MetricKind.TOKENS)}
    assert divide(eight, 1, 2) == {"x": 8 / (2 + 1e-8)}
    assert divide(eight, 1, 0)["x"] == pytest.approx(8e8)


def test_masks_are_read_in_the_next_token_frame():
    assert EXAMPLE.tokens.tolist() == [[1, 1], [0, 1], [1, 1]]
    assert EXAMPLE.valid.tolist() == [[1, 1], [0, 1], [0, 0]]
    assert EXAMPLE.keep(VALUES, "values").tolist() == [[1, 2], [0, 8], [0, 0]]


def test_counts_are_those_of_the_loss(make_batch: BatchMaker):
    _, data = make_batch()
    seqs, toks = valid_counts(data)
    expected = sum(
        on
        for row, keep in zip(data["token_mask"].tolist(), data["sample_mask"].tolist(), strict=True)
        for on in row[1:]
        if keep
    )
    assert (seqs.item(), toks.item()) == (4, expected)
    assert seqs.dtype == toks.dtype == torch.float64


def test_counts_add_up_over_parts_and_are_exact_beyond_fp32():
    ones = BatchedDataDict(token_mask=torch.ones(2, 2).expand(2, 2), sample_mask=torch.tensor([2.0**24, 1.0]))
    seqs, toks = valid_counts(ones)
    assert seqs.item() == toks.item() == 2**24 + 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (MetricKind.TOKENS, 7 + 1e-8),
        (MetricKind.SEQUENCES, 3 + 1e-8),
        (MetricKind.NONE, 1),
        (MetricKind.MIN, 1),
        (MetricKind.MAX, 1),
    ],
)
def test_each_kind_names_its_denominator(kind: MetricKind, expected: float):
    total = torch.tensor(5.0, dtype=torch.float64)
    assert normalize(total, kind, torch.tensor(3), torch.tensor(7)).item() == pytest.approx(5 / expected)


def test_a_missing_key_is_named_with_its_reason_and_what_there_is():
    with refused("missing-column", "'values'", "the critic", ["a", "b"]):
        require({"b": VALUES, "a": VALUES}, "values", "the critic")
