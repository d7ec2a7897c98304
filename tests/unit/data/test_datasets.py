import os
import subprocess
import sys

import pytest
from refusals import refused

from nemo_rl_mcore.data.datasets import DIGIT_TASKS, DigitTaskSource, is_held_out


def all_prompts(num_digits: int) -> list[str]:
    return [f"{i:0{num_digits}d}>" for i in range(10**num_digits)]


@pytest.mark.parametrize(
    ("task", "answer"), [("copy", "5209"), ("reverse", "9025"), ("sort", "0259"), ("increment", "6310")]
)
def test_answers(task: str, answer: str) -> None:
    assert DIGIT_TASKS[task]("5209") == answer


def test_prompts_show_the_digits_and_carry_the_answer() -> None:
    for prompt in DigitTaskSource("reverse", 3, seed=0).train_batch(step=1, count=50):
        assert prompt.text == f"{prompt.index:03d}>"
        assert prompt.answer == f"{prompt.index:03d}"[::-1]


def test_the_calculators_digits_are_two_numbers_to_add() -> None:
    for prompt in DigitTaskSource("calculator", 4, seed=0).train_batch(step=1, count=50):
        digits = f"{prompt.index:04d}"
        assert prompt.text == f"{digits[:2]}+{digits[2:]}>"
        assert prompt.answer == f"{int(digits[:2]) + int(digits[2:]):05d}"


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


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    source = DigitTaskSource("copy", 3, seed=4)
    source.train_batch(step=9, count=30)
    assert source.train_batch(3, 16) == DigitTaskSource("copy", 3, seed=4).train_batch(3, 16)
    assert source.train_batch(3, 16) != source.train_batch(4, 16)
    assert source.train_batch(3, 16) != DigitTaskSource("copy", 3, seed=5).train_batch(3, 16)


def test_a_larger_draw_extends_a_smaller_one() -> None:
    source = DigitTaskSource("copy", 3, seed=0)
    assert source.train_batch(1, 40)[:16] == source.train_batch(1, 16)


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


def test_validation_is_the_same_for_every_seed() -> None:
    one, other = DigitTaskSource("copy", 3, seed=0), DigitTaskSource("copy", 3, seed=1)
    assert one.validation(20) == other.validation(20)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
@pytest.mark.stage("processes")
def test_prompts_do_not_depend_on_the_process(hash_seed: str) -> None:
    code = (
        "from nemo_rl_mcore.data.datasets import DigitTaskSource\n"
        "source = DigitTaskSource('copy', 3, seed=11)\n"
        "import sys\n"
        "sys.stdout.write(repr([p.index for p in source.train_batch(2, 8) + source.validation(8)]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    source = DigitTaskSource("copy", 3, seed=11)
    assert output == repr([p.index for p in source.train_batch(2, 8) + source.validation(8)])


def test_long_digit_strings_cost_no_memory() -> None:
    batch = DigitTaskSource("sort", 15, seed=0).train_batch(1, 32)
    assert len({prompt.index for prompt in batch}) == 32
    assert all(len(prompt.text) == 16 for prompt in batch)


def test_unknown_task_and_bad_length() -> None:
    with refused("unknown-task", "'add'", "copy, reverse, sort, increment, guess_"):
        DigitTaskSource("add", 3, seed=0)
    with refused("num-digits", "data.num_digits", 1):
        DigitTaskSource("copy", 0, seed=0)
