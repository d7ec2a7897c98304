from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.epochs import EpochSource


def source(rows, per_step, seed=0, held_out=3):
    prompts = [Prompt(index, f"question {index}", "answer") for index in range(rows + held_out)]
    return EpochSource(prompts[:rows], prompts[rows:], seed, per_step)


def indices(source, step, count):
    return [prompt.index for prompt in source.train_batch(step, count)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(1, 4))
def test_every_pass_holds_each_row_once_and_no_step_a_row_twice(rows, per_step, seed, passes):
    rows = max(rows, per_step)
    drawn = source(rows, per_step, seed)
    steps = [indices(drawn, step, per_step) for step in range(1, passes * rows // per_step + 1)]
    assert all(len(set(step)) == per_step for step in steps)
    stream = list(chain.from_iterable(steps))
    for start in range(0, len(stream), rows):
        seen = Counter(stream[start : start + rows])
        assert set(seen.values()) == {1}
        if len(stream) - start >= rows:
            assert seen.keys() == set(range(rows))


def test_a_step_depends_on_seed_and_step_alone():
    forward, backward = source(20, 6), source(20, 6)
    steps = [indices(forward, step, 6) for step in range(1, 11)]
    assert steps == [indices(backward, step, 6) for step in range(10, 0, -1)][::-1]
    assert steps != [indices(source(20, 6, seed=1), step, 6) for step in range(1, 11)]


def test_passes_are_in_different_orders():
    drawn = source(20, 20)
    orders = {tuple(indices(drawn, step, 20)) for step in range(1, 6)}
    assert len(orders) == 5
    assert tuple(range(20)) not in orders


def test_further_rows_of_a_step_are_other_ones_and_leave_the_first_as_they_are():
    drawn = source(20, 6)
    for step in (1, 2, 4, 9):
        first, more = indices(drawn, step, 6), indices(drawn, step, 18)
        assert more[:6] == first
        assert len(set(more)) == 18
        assert more[:12] == indices(drawn, step, 12)


def test_more_rows_than_there_are_is_an_error():
    with pytest.raises(ValueError, match=r"21 rows of a step are more than the 20 of data\.train"):
        source(20, 6).train_batch(1, 21)
    with pytest.raises(ValueError, match="4 rows of a validation are more than the 3 held out"):
        source(20, 6).validation(4)


def test_validation_gives_the_same_held_out_rows():
    drawn = source(20, 6)
    assert [prompt.index for prompt in drawn.validation(2)] == [20, 21]
