from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.data.datasets import EpochSource, Prompt


def source(rows, per_step, seed=0, held_out=3, **options):
    prompts = [Prompt(index, f"question {index}", "answer") for index in range(rows + held_out)]
    return EpochSource(prompts[:rows], prompts[rows:], seed, per_step, **options)


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


@given(st.integers(1, 12), st.integers(1, 12))
def test_without_a_shuffle_each_pass_is_as_the_rows_lie(rows, per_step):
    rows = max(rows, per_step)
    drawn = source(rows, per_step, shuffle=False)
    stream = [row for step in range(1, 3 * rows // per_step + 1) for row in indices(drawn, step, per_step)]
    assert stream == [place % rows for place in range(len(stream))]
    assert drawn.first_steps(1, per_step) == [1] * per_step


def test_more_rows_than_there_are_is_an_error():
    with refused("too-few-rows", 4, 3, "data.train"):
        source(3, 6).train_batch(1, 4)
    with refused("too-few-rows", 7, 6):
        source(20, 6).train_batch(1, 7)


def test_validation_gives_the_same_held_out_rows_as_many_as_there_are():
    drawn = source(20, 6)
    assert [prompt.index for prompt in drawn.validation(2)] == [20, 21]
    assert [prompt.index for prompt in drawn.validation(4)] == [20, 21, 22]


# Sources with weights


def mixture(rows, weights, per_step, seed=0, *, shuffle=True):
    names = [name for name, count in rows.items() for _ in range(count)]
    prompts = [Prompt(index, f"question {index}", "", source=name) for index, name in enumerate(names)]
    return EpochSource(prompts, [], seed, per_step, weights, shuffle)


@st.composite
def mixtures(draw):
    """A mixture whose steps are at most as long as all its rows, however many its sources have."""
    weights = {
        f"s{number}": draw(st.floats(0.1, 3, allow_nan=False)) for number in range(draw(st.integers(1, 4)))
    }
    rows = {name: draw(st.integers(1, 12)) for name in weights}
    per_step = draw(st.integers(1, sum(rows.values())))
    return mixture(rows, weights, per_step, draw(st.integers(0, 2))), rows, weights


@given(mixtures(), st.integers(1, 30))
def test_a_mixture_has_whole_passes_and_no_row_twice_in_a_step(given, steps):
    drawn, rows, weights = given
    batches = [drawn.train_batch(step, drawn.per_step) for step in range(1, steps + 1)]
    for batch in batches:
        assert len({prompt.index for prompt in batch}) == len(batch) == drawn.per_step
    stream = list(chain.from_iterable(batches))
    for name in weights:
        own = [prompt.index for prompt in stream if prompt.source == name]
        for start in range(0, len(own) - rows[name] + 1, rows[name]):
            assert len(set(own[start : start + rows[name]])) == rows[name]


def test_a_mixture_has_each_source_as_often_as_its_weight_says():
    drawn = mixture({"a": 500, "b": 500, "c": 500}, {"a": 0.7, "b": 0.2, "c": 0.1}, 100)
    found = Counter(prompt.source for step in range(1, 41) for prompt in drawn.train_batch(step, 100))
    # Four standard deviations of 4000 draws.
    assert abs(found["a"] - 2800) < 116
    assert abs(found["b"] - 800) < 102
    assert abs(found["c"] - 400) < 76


@given(mixtures(), st.integers(1, 40))
def test_a_mixture_opened_anew_goes_on_alike(given, step):
    drawn, _, weights = given
    before = [drawn.train_batch(number, drawn.per_step) for number in range(1, step + 1)]
    anew = EpochSource(drawn.train, [], drawn.seed, drawn.per_step, weights)
    assert anew.train_batch(step, drawn.per_step) == before[-1]


# The step that draws a row first


def assert_first_steps(drawn, steps):
    met = {}
    for step in range(1, steps + 1):
        batch = drawn.train_batch(step, drawn.per_step)
        wanted = [met.setdefault(prompt.index, step) for prompt in batch]
        assert drawn.first_steps(step, drawn.per_step) == wanted


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3))
def test_the_first_step_of_a_row_is_that_which_draws_it_first(rows, per_step, seed):
    rows = max(rows, per_step)
    assert_first_steps(source(rows, per_step, seed), 3 * rows // per_step + 1)


@given(mixtures(), st.integers(1, 30))
def test_the_first_step_of_a_row_of_a_mixture(given, steps):
    assert_first_steps(given[0], steps)


def test_the_first_step_is_known_to_a_source_that_is_opened_in_a_later_pass():
    wanted = source(20, 6)
    assert source(20, 6).first_steps(9, 6) == wanted.first_steps(9, 6)
    assert max(wanted.first_steps(9, 6)) <= 4


def test_weights_share_out_sources_that_are_each_in_their_order():
    drawn = mixture({"a": 6, "b": 4}, {"a": 1, "b": 1}, 4, shuffle=False)
    taken = [row for step in (1, 2) for row in indices(drawn, step, 4)]
    of_a, of_b = ([row for row in taken if (row < 6) is first] for first in (True, False))
    assert of_a == [row % 6 for row in range(len(of_a))]
    assert of_b == [6 + row % 4 for row in range(len(of_b))]
    assert 1 <= len(of_b) <= 7
