from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.data.answers import PreferenceSource, given_answers
from nemo_rl_mcore.data.datasets import DIGIT_TASKS, DigitTaskSource, EpochSource, Prompt, is_held_out
from nemo_rl_mcore.data.tokenizer import load_tokenizer


def all_prompts(num_digits: int) -> list[str]:
    return [f"{i:0{num_digits}d}>" for i in range(10**num_digits)]


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [
        ("copy", "{0}>", "{0}"),
        ("reverse", "{0}>", "{0[3]}{0[2]}{0[1]}{0[0]}"),
        ("calculator", "{0[0]}{0[1]}+{0[2]}{0[3]}>", "{1:05d}"),
    ],
)
def test_prompts_show_the_digits_and_carry_the_answer(task: str, prompt: str, answer: str) -> None:
    for found in DigitTaskSource(task, 4, seed=0).train_batch(step=1, count=50):
        digits = f"{found.index:04d}"
        total = int(digits[:2]) + int(digits[2:])
        assert (found.text, found.answer) == (prompt.format(digits, total), answer.format(digits, total))


@pytest.mark.parametrize(("task", "answer"), [("sort", "0259"), ("increment", "6310")])
def test_answers(task: str, answer: str) -> None:
    assert DIGIT_TASKS[task]("5209") == answer


@pytest.mark.parametrize("digits", [2, 4])
def test_the_games_digits_are_bounds_with_every_number_between_them(digits: int) -> None:
    source, width = DigitTaskSource("guess_number", digits, seed=0), digits // 2
    held_out, trained = source.validation(18), source.train_batch(1, 180)
    for prompt in (*held_out, *trained):
        assert len(prompt.text) == digits + 1
        assert len(prompt.answer) == width
        lowest, highest = prompt.text[:width], prompt.text[width:-1]
        assert lowest <= prompt.answer <= highest
        assert lowest < highest
    assert len({prompt.index for prompt in trained}) == len(trained)
    assert not {prompt.text for prompt in held_out} & {prompt.text for prompt in trained}
    if digits == 2:
        assert len({(prompt.text, prompt.answer) for prompt in trained}) == len(trained)


def test_a_batch_is_a_pure_function_of_seed_and_step_and_begins_larger_ones() -> None:
    source = DigitTaskSource("copy", 3, seed=4)
    source.train_batch(step=9, count=30)
    drawn = source.train_batch(3, 16)
    assert drawn == DigitTaskSource("copy", 3, seed=4).train_batch(3, 16) == source.train_batch(3, 40)[:16]
    assert drawn != source.train_batch(4, 16)
    other = DigitTaskSource("copy", 3, seed=5)
    assert drawn != other.train_batch(3, 16)
    assert source.validation(20) == other.validation(20)


def test_the_whole_pool_can_be_drawn_without_replacement() -> None:
    pool = {text for text in all_prompts(2) if not is_held_out(text)}
    batch = DigitTaskSource("copy", 2, seed=0).train_batch(step=7, count=len(pool))
    assert len(batch) == len(pool)
    assert {prompt.text for prompt in batch} == pool


def test_draws_are_uniform_over_the_pool() -> None:
    source = DigitTaskSource("copy", 2, seed=0)
    counts: dict[int, int] = {}
    for step in range(2000):
        for prompt in source.train_batch(step, 4):
            counts[prompt.index] = counts.get(prompt.index, 0) + 1
    pool_size = sum(not is_held_out(text) for text in all_prompts(2))
    expected = 2000 * 4 / pool_size
    assert len(counts) == pool_size
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_a_tenth_is_held_out_and_never_trained_on() -> None:
    held_out = {text for text in all_prompts(3) if is_held_out(text)}
    assert 70 <= len(held_out) <= 130
    source = DigitTaskSource("copy", 3, seed=0)
    trained = {prompt.text for step in range(300) for prompt in source.train_batch(step, 16)}
    assert len(trained) > 800
    assert not trained & held_out
    validation = source.validation(64)
    assert len({prompt.index for prompt in validation}) == 64
    assert {prompt.text for prompt in validation} <= held_out


def test_prompts_depend_neither_on_the_process_nor_on_its_hashes() -> None:
    source = DigitTaskSource("copy", 3, seed=11)
    assert [p.index for p in source.train_batch(2, 8)] == [402, 322, 299, 690, 844, 532, 15, 896]
    assert [p.index for p in source.validation(8)] == [72, 624, 467, 296, 132, 463, 770, 967]


def test_long_digit_strings_cost_no_memory() -> None:
    batch = DigitTaskSource("sort", 15, seed=0).train_batch(1, 32)
    assert len({prompt.index for prompt in batch}) == 32
    assert all(len(prompt.text) == 16 for prompt in batch)


def test_unknown_task_and_bad_length() -> None:
    with refused("unknown-task", "'add'", "copy, reverse, sort, increment, guess_"):
        DigitTaskSource("add", 3, seed=0)
    with refused("num-digits", "data.num_digits", 1):
        DigitTaskSource("copy", 0, seed=0)


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


@given(
    st.builds(
        lambda rows, per_step, seed: source(max(rows, per_step), per_step, seed),
        st.integers(1, 40),
        st.integers(1, 40),
        st.integers(0, 3),
    )
    | mixtures().map(lambda given: given[0])
)
def test_the_first_step_of_a_row_is_that_which_draws_it_first(drawn):
    met = {}
    for step in range(1, 3 * len(drawn.train) // drawn.per_step + 2):
        batch = drawn.train_batch(step, drawn.per_step)
        wanted = [met.setdefault(prompt.index, step) for prompt in batch]
        assert drawn.first_steps(step, drawn.per_step) == wanted


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


TOKENIZER = load_tokenizer("char")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def texts(rows):
    """Prompt and trained answer of each row."""
    trained = rows["token_mask"] != 0
    return [
        (TOKENIZER.decode(ids[: int(on.float().argmax())].tolist()), TOKENIZER.decode(ids[on].tolist()))
        for ids, on in zip(rows["input_ids"], trained, strict=True)
    ]


class Given:
    """A source of these answers."""

    def __init__(self, *answers):
        self.prompts = [Prompt(index, f"{index}>", answer) for index, answer in enumerate(answers)]

    def train_batch(self, step, count):
        return self.prompts[:count]

    validation = None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("1234", "4231"),
        ("12", "21"),
        ("1231", "1232"),  # first and last are equal
        ("999", "990"),
        ("5", "6"),
        ("9", "0"),
    ],
)
def test_the_wrong_answer_of_an_embedded_task(right, wrong):
    rows = PreferenceSource(Given(right), TOKENIZER, made_up=True).train_batch(1, 1)
    assert texts(rows) == [("0>", right), ("0>", wrong)]


@pytest.mark.parametrize("task", DIGIT_TASKS)
def test_every_pair_of_a_task_has_a_right_and_a_wrong_answer_of_equal_length(task):
    rows = PreferenceSource(DigitTaskSource(task, 2, seed=3), TOKENIZER, made_up=True).train_batch(1, 80)
    found = texts(rows)
    for (prompt, chosen), (same_prompt, rejected) in zip(found[::2], found[1::2], strict=True):
        assert prompt == same_prompt
        assert chosen == DIGIT_TASKS[task](prompt[:-1]) != rejected
        assert len(chosen) == len(rejected)


def test_rows_by_hand():
    rows = given_answers([Prompt(7, "12>", "21"), Prompt(9, "3>", "3")], TOKENIZER)
    assert rows["input_ids"].tolist() == [[1, 2, 12, 2, 1, EOS], [3, 12, 3, EOS, PAD, PAD]]
    assert rows["input_lengths"].tolist() == [6, 4]
    assert rows["token_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]
    assert rows["sample_mask"].tolist() == [1, 1]
    assert (rows["prompt_index"].tolist(), rows["sample_index"].tolist()) == ([7, 9], [0, 0])


TEXTS = st.text("0123456789+=>", min_size=1, max_size=8)


@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_what_is_trained_on_decodes_to_the_answer_and_the_rest_to_the_prompt(texts):
    rows = given_answers([Prompt(i, *text) for i, text in enumerate(texts)], TOKENIZER)
    for row, (prompt, answer) in enumerate(texts):
        ids, length = rows["input_ids"][row], int(rows["input_lengths"][row])
        trained = rows["token_mask"][row] != 0
        assert ids[trained].tolist() == [*TOKENIZER.encode(answer), EOS]
        assert TOKENIZER.decode(ids[:length][~trained[:length]].tolist()) == prompt
        assert (ids[length:] == PAD).all()
        assert not trained[length:].any()
