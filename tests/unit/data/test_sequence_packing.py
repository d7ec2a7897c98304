from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from uneven_batch import COLUMNS, batch, made

from nemo_rl_mcore.data.microbatch import PackedRows, TokenBudget, first_fit_decreasing

CAPACITY = 20


@given(st.lists(st.integers(0, CAPACITY), max_size=60))
def test_bins_hold_every_index_once_within_the_capacity(lengths):
    bins = first_fit_decreasing(lengths, CAPACITY)
    assert sorted(index for group in bins for index in group) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in group) <= CAPACITY for group in bins)
    assert bins == first_fit_decreasing(lengths, CAPACITY)


@given(st.lists(st.integers(1, CAPACITY), max_size=60))
def test_no_two_bins_fit_into_one(lengths):
    filled = sorted(
        sum(lengths[index] for index in group) for group in first_fit_decreasing(lengths, CAPACITY)
    )
    assert all(first + second > CAPACITY for first, second in pairwise(filled))


def test_each_goes_into_the_first_bin_with_room():
    # 9 and 8 begin bins, 6 fits neither, 2 fits the second, 1 the first.
    assert first_fit_decreasing([1, 6, 9, 2, 8], 10) == [[2, 0], [4, 3], [1]]


def test_a_length_above_the_capacity_is_refused():
    with refused("capacity", 11, 10):
        first_fit_decreasing([3, 11], 10)


def packs(tokens=14, **options):
    return PackedRows(TokenBudget(tokens, **options))


def test_a_packed_row_is_its_samples_without_padding():
    packed, *more = made(packs(length_round=4), batch([3, 0, 4, 2]))
    assert not more
    assert packed.places.tolist() == [2, 0, 3, 1]
    assert packed.input_ids.tolist() == [[15, 16, 17, 18, 1, 2, 3, 22, 23, 0, 0, 0]]
    assert packed.padding.tolist() == [[False] * 9 + [True] * 3]
    # A sample without tokens has no borders of its own; the padding stands alone.
    assert packed.borders == (0, 4, 7, 9, 12)
    assert packed.rows["input_ids"].shape == (4, 4)


def test_a_full_row_has_no_padding():
    packed = made(packs(7), batch([3, 4]))[0]
    assert packed.borders == (0, 4, 7)
    assert packed.input_ids.shape == (1, 7)


@given(st.lists(st.integers(0, COLUMNS), min_size=1, max_size=12), st.integers(COLUMNS, 30))
def test_gradients_reach_the_tokens_they_come_from(lengths, tokens):
    for part in made(packs(tokens, length_round=3), batch(lengths)):
        length = part.input_ids.shape[1]
        assert length <= tokens
        for more in ((), (2,)):
            values = torch.randn(1, length, *more, requires_grad=True)
            weights = torch.randn(*part.rows["input_ids"].shape, *more)
            (part.from_model(values) * weights).sum().backward()
            real = part.to_model(part.rows["token_mask"]).view(1, length, *[1 for _ in more])
            assert torch.equal(values.grad, part.to_model(weights) * real)


def test_pipelines_get_rows_of_one_length():
    cut = PackedRows(TokenBudget(8, length_round=2), equal_columns=True)
    parts = made(cut, batch([7, 3, 2]), empty=1)
    assert {part.input_ids.shape for part in parts} == {(1, 8)}
    assert parts[-1].borders == (0, 8)


def test_a_pair_is_packed_whole():
    # Tokens of the pairs: 9, 10, 5.
    cut = PackedRows(TokenBudget(15), rows_per_sample=2)
    assert cut.groups(batch([7, 2, 3, 7, 2, 3])) == [[2, 3, 4, 5], [0, 1]]


def test_a_pair_above_the_budget_raises_the_budget_of_its_batch():
    cut = PackedRows(TokenBudget(8), rows_per_sample=2)
    packed = made(cut, batch([7, 6, 2, 1, 3, 4]))
    assert [part.places.tolist() for part in packed] == [[0, 1], [4, 5, 2, 3]]
    assert [part.input_ids.shape[1] for part in packed] == [13, 10]


def test_filling_of_a_packed_row_is_a_whole_sample():
    parts = made(PackedRows(TokenBudget(20), rows_per_sample=2), batch([4, 1]), empty=1)
    assert [part.rows.size for part in parts] == [2, 2]
    assert not parts[1].rows["sample_mask"].any()


def test_rows_of_a_packed_row_are_padded_one_by_one():
    packed = made(PackedRows(TokenBudget(16, column_multiple=4), row_multiple=4), batch([3, 0, 4, 5]))[0]
    assert packed.places.tolist() == [3, 0, 2, 1]
    assert packed.borders == (0, 8, 12, 16)
    real = [True] * 5 + [False] * 3 + [True] * 3 + [False] + [True] * 4
    assert packed.padding.tolist() == [[not one for one in real]]
