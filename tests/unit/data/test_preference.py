"""Pairs of answers as rows, and those that are made of an embedded task."""

import pytest
import torch

from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import DIGIT_TASKS, DigitTaskSource, Prompt, is_held_out
from nemo_rl_mcore.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("char")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def texts(rows):
    """Prompt and trained answer of each row."""
    trained = rows["token_mask"] != 0
    return [
        (
            TOKENIZER.decode(ids[: int(on.float().argmax())].tolist()),
            TOKENIZER.decode(ids[on].tolist()),
        )
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


def test_training_and_validation_draw_from_their_own_prompts():
    pairs = PreferenceSource(DigitTaskSource("copy", 3, seed=3), TOKENIZER, made_up=True)
    assert not any(is_held_out(prompt) for prompt, _ in texts(pairs.train_batch(1, 20)))
    assert all(is_held_out(prompt) for prompt, _ in texts(pairs.rows(pairs.prompts.validation(20))))
    assert torch.equal(pairs.train_batch(2, 5)["input_ids"], pairs.train_batch(2, 5)["input_ids"])
    first, second = (pairs.train_batch(step, 20)["prompt_index"].tolist() for step in (1, 2))
    assert first != second
    assert len(set(first)) == 20
