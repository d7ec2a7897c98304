from hypothesis import given
from hypothesis import strategies as st
from uneven_batch import COLUMNS, batch, made

from nemo_rl_mcore.data.microbatch import DynamicRows, TokenBudget


@given(
    st.lists(st.integers(0, COLUMNS), min_size=1, max_size=20), st.integers(COLUMNS, 40), st.integers(1, 5)
)
def test_padded_tokens_stay_within_the_budget(lengths, tokens, length_round):
    for part in made(DynamicRows(TokenBudget(tokens, length_round)), batch(lengths)):
        rows, columns = part.rows["input_ids"].shape
        longest = max(lengths[place] for place in part.places)
        assert rows == len(part.places)
        assert rows * columns <= tokens
        assert longest <= columns <= max(COLUMNS, 1)
        assert columns - max(longest, 1) < length_round


def test_rows_of_like_length_go_together_the_longest_first():
    groups = DynamicRows(TokenBudget(14)).groups(batch([2, 7, 3, 6, 2, 2]))
    assert groups == [[1, 3], [2, 0, 4, 5]]


def test_a_layout_may_pad_a_row_beyond_the_budget_but_never_adds_another_row_to_it():
    parts = made(DynamicRows(TokenBudget(7, column_multiple=4)), batch([7, 4, 3]))
    assert [tuple(part.rows["input_ids"].shape) for part in parts] == [(1, 8), (1, 4), (1, 4)]


def test_a_pair_goes_where_its_longer_row_goes():
    # Longest rows of the pairs: 4, 7, 3.
    cut = DynamicRows(TokenBudget(16), rows_per_sample=2)
    assert cut.groups(batch([4, 1, 2, 7, 3, 3])) == [[2, 3], [0, 1, 4, 5]]


def test_a_pair_above_the_budget_is_a_microbatch_of_its_own():
    cut = DynamicRows(TokenBudget(8), rows_per_sample=2)
    assert cut.groups(batch([7, 7, 2, 1, 1, 2])) == [[0, 1], [2, 3, 4, 5]]


def test_filling_is_a_whole_sample():
    parts = made(DynamicRows(TokenBudget(20), rows_per_sample=2), batch([4, 1]), empty=1)
    assert [part.rows.size for part in parts] == [2, 2]
    assert not parts[1].rows["sample_mask"].any()


@given(
    st.integers(2, 4), st.lists(st.integers(0, COLUMNS), min_size=1, max_size=20), st.integers(COLUMNS, 60)
)
def test_no_sample_is_parted(size, lengths, tokens):
    whole = lengths * size
    for group in DynamicRows(TokenBudget(tokens), rows_per_sample=size).groups(batch(whole)):
        for first in range(0, len(group), size):
            assert group[first] % size == 0
            assert group[first : first + size] == list(range(group[first], group[first] + size))
