from hypothesis import given
from hypothesis import strategies as st
from uneven_batch import COLUMNS, batch, made

from nemo_rl_mcore.data.dynamic_batching import DynamicRows
from nemo_rl_mcore.data.token_budget import TokenBudget


@given(
    st.lists(st.integers(0, COLUMNS), min_size=1, max_size=20), st.integers(COLUMNS, 40), st.integers(1, 5)
)
def test_padded_tokens_stay_within_the_budget(lengths, tokens, length_round):
    for part in made(DynamicRows(TokenBudget(tokens, "key", length_round)), batch(lengths)):
        rows, columns = part.rows["input_ids"].shape
        longest = max(lengths[place] for place in part.places)
        assert rows == len(part.places)
        assert rows * columns <= tokens
        assert longest <= columns <= max(COLUMNS, 1)
        assert columns - max(longest, 1) < length_round


def test_rows_of_like_length_go_together_the_longest_first():
    groups = DynamicRows(TokenBudget(14, "key")).groups(batch([2, 7, 3, 6, 2, 2]))
    assert groups == [[1, 3], [2, 0, 4, 5]]


def test_a_layout_may_pad_a_row_beyond_the_budget_but_never_adds_another_row_to_it():
    parts = made(DynamicRows(TokenBudget(7, "key", column_multiple=4)), batch([7, 4, 3]))
    assert [tuple(part.rows["input_ids"].shape) for part in parts] == [(1, 8), (1, 4), (1, 4)]
