import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.token_budget import TokenBudget, balanced, deal_balanced

KEY = "policy.dynamic_batching.train_mb_tokens"


@pytest.mark.parametrize(
    ("length", "at_most", "padded"),
    [(1, None, 8), (8, None, 8), (9, None, 16), (17, None, 20), (0, None, 8), (9, 10, 12), (3, 3, 4)],
)
def test_padding_stops_at_the_budget_and_is_cut_evenly(length, at_most, padded):
    assert TokenBudget(20, KEY, length_round=8, column_multiple=4).padded(length, at_most=at_most) == padded


def rows(lengths, **extra):
    return BatchedDataDict(
        input_ids=torch.ones(len(lengths), 6), input_lengths=torch.tensor(lengths), **extra
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rows([4, 5, 6]), rf"rows of \[5, 6\] tokens are longer than {KEY}: 4"),
        (rows([4, 7]), r"input_lengths \[7\] are outside 0 to 6"),
        (rows([-1, 2]), r"input_lengths \[-1\] are outside 0 to 6"),
        (rows([2, 4], token_mask=torch.ones(2, 6)), r"behind input_lengths in rows \[0, 1\]"),
        (BatchedDataDict(input_ids=torch.ones(2, 6)), rf"no 'input_lengths', which {KEY} needs"),
    ],
)
def test_rows_that_cannot_be_cut_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        TokenBudget(4, KEY).row_lengths(data)


def test_a_mask_within_the_lengths_is_accepted():
    mask = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]])
    assert TokenBudget(4, KEY).row_lengths(rows([2, 4], token_mask=mask)) == [2, 4]


@given(st.integers(1, 4), st.lists(st.integers(1, 50), max_size=24))
def test_balancing_keeps_every_sample_once_and_the_shards_as_even_as_can_be(shards: int, lengths: list[int]):
    dealt = balanced(lengths, shards)
    assert sorted(sample for shard in dealt for sample in shard) == list(range(len(lengths)))
    sizes = [len(shard) for shard in dealt]
    assert max(sizes) - min(sizes) == (1 if len(lengths) % shards else 0)


def test_balancing_spreads_long_samples():
    lengths = [9, 8, 7, 1, 1, 1]
    assert balanced(lengths, 2) == [[0, 3, 4], [1, 2, 5]]  # 11 and 16 tokens; in the batch's order 24 and 3


def test_pairs_are_balanced_whole():
    # Tokens of the pairs: 7, 6, 2, 9.
    data = rows([1, 6, 3, 3, 1, 1, 5, 4])
    shards = deal_balanced(data, 2, rows_per_sample=2)
    assert [shard["input_lengths"].tolist() for shard in shards] == [[5, 4, 1, 1], [1, 6, 3, 3]]
    with pytest.raises(ValueError, match="7 rows are no whole samples of 2 rows"):
        deal_balanced(data.slice(0, 7), 2, rows_per_sample=2)
