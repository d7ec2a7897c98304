import json
from itertools import pairwise

import pytest
from said_turns import play

from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.environment.games import (
    ArithmeticEnvironment,
    CalculatorEnvironment,
    GuessNumberEnvironment,
    character_score,
)
from nemo_rl_mcore.environment.interface import Vote, votes_of

GAME = GuessNumberEnvironment()
PROMPT = Prompt(185, "18>", "5")
"""One of eight numbers."""


TOOL = CalculatorEnvironment()
SUM = Prompt(3725, "37+25>", "00062")


@pytest.mark.parametrize(
    ("answers", "observations", "rewards"),
    [
        (["5$"], [], [1.0]),
        (["4$", "6$", "5$"], ["h>", "l>"], [16 / 64, 12 / 64, 36 / 64]),
        (["8$", "5$"], ["l>"], [4 / 64, 60 / 64]),
        (["4$", "3$", "4$"], ["h>", "h>", "h>"], [16 / 64, 0.0, 0.0]),  # nothing new
        (["9$", "0$"], ["l>", "h>"], [0.0, 0.0]),  # beyond the bounds
        (["4", "4$"], ["e>", "h>"], [1 / 128, 31 / 128]),
        (["44$", "9", "4x$"], ["e>", "e>", "e>"], [1 / 128, 0.0, 0.0]),
        (["$", "a$", "²$", "+5$"], ["e>"] * 4, [0.0] * 4),
    ],
)
def test_what_is_said_to_guesses(answers, observations, rewards):
    played = play(GAME, PROMPT, answers)
    assert played.observations == observations
    assert played.rewards == rewards
    assert played.terminated is (answers[-1] == "5$")


@pytest.mark.parametrize("digits", [2, 4])
def test_halving_finds_every_number_and_earns_exactly_1(digits):
    width = digits // 2
    for prompt in DigitTaskSource("guess_number", digits, seed=0).train_batch(1, 100):
        lowest, highest, answers = int(prompt.text[:width]), int(prompt.text[width:digits]), []
        while True:
            guess = (lowest + highest) // 2
            answers.append(f"{guess:0{width}d}$")
            played = play(GAME, prompt, answers)
            if played.terminated:
                break
            lowest, highest = (guess + 1, highest) if played.observations[-1] == "h>" else (lowest, guess - 1)
        assert sum(played.rewards) == 1.0
        assert len(answers) <= {2: 4, 4: 7}[digits]


def test_less_than_the_number_earns_at_most_a_half():
    answers = [f"{number}$" for number in (1, 2, 3, 4, 8, 7, 6)]
    rewards = play(GAME, PROMPT, answers).rewards
    totals = [sum(rewards[:count]) for count in range(len(rewards) + 1)]
    assert all(before < after for before, after in pairwise(totals))
    assert totals[-1] == 28 / 64


def test_numbers_of_two_digits_are_guessed_with_two():
    played = play(GAME, Prompt(83217, "0832>", "17"), ["9$", "09$", "20$", "17$"])
    assert played.observations == ["e>", "h>", "l>"]
    assert sum(played.rewards) == 1.0


@pytest.mark.parametrize(("game", "prompt", "answer"), [(GAME, PROMPT, "4$"), (TOOL, SUM, "37+25$")])
def test_the_state_of_an_episode_is_plain_data(game, prompt, answer):
    (reply,) = play(game, prompt, [answer]).replies
    assert json.loads(json.dumps(reply.metadata)) == reply.metadata


@pytest.mark.parametrize(
    ("answers", "observations", "total", "terminated"),
    [
        (["37+25$", "00062$"], ["00062>"], 1.0, True),
        (["00062$"], [], 1.0, True),  # without the tool
        (["25+37$", "00062$"], ["00062>"], 1.0, True),  # a call of one's own
        (["37+$", "37+25$", "00062$"], ["e>", "00062>"], 1.0, True),  # told, and called again
        (["1+2$", "37+25$", "00062$"], ["00003>", "00062>"], 1.0, True),  # another call after a value
        (["37+25$", "00063$"], ["00062>"], 32 / 64 + 26 / 64, True),
        (["37+25$", "00062"], ["00062>"], 32 / 64 + 26 / 64, True),
        (["37+24$", "00061$"], ["00061>"], 26 / 64 + 26 / 64, True),  # well read
        (["1+1$", "00002$"], ["00002>"], 0.0, True),  # but a call of nothing in common
        (["37+25"], ["e>"], 26 / 64, False),
        (["37+24$", "37+25$"], ["00061>", "00062>"], 32 / 64, False),
        (["63$"], ["00063>"], 0.0, False),
        (["$", "+$", "a$"], ["e>"] * 3, 0.0, False),
    ],
)
def test_what_is_said_to_answers(answers, observations, total, terminated):
    played = play(TOOL, SUM, answers)
    assert played.observations == observations
    assert sum(played.rewards) == total
    assert played.terminated is terminated


@pytest.mark.parametrize("digits", [2, 4])
def test_calling_and_reading_earns_exactly_1(digits):
    for prompt in DigitTaskSource("calculator", digits, seed=0).train_batch(1, 80):
        first = play(TOOL, prompt, [f"{prompt.text[:-1]}$"])
        assert first.observations == [f"{prompt.answer}>"]
        assert play(TOOL, prompt, [f"{prompt.text[:-1]}$", f"{prompt.answer}$"]).rewards == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("37+25", 62),
        ("007", 7),
        ("1+2+3", 6),
        *((text, None) for text in ("", "+5", "5+", "5++5", "5-3", "5 + 3", "2**9", "__import__", "٣+1")),
        ("9" * 9, 999999999),
        ("9" * 10, None),
    ],
)
def test_only_sums_are_understood(text, value):
    assert play(TOOL, SUM, [f"{text}$"]).observations == ["e>" if value is None else f"{value:05d}>"]


@pytest.mark.parametrize(
    ("response", "finished", "score"),
    [
        ("527", True, 1.0),
        ("527", False, 0.75),  # never ended
        ("5271", True, 0.75),  # one character too many: the end is in the wrong place
        ("52", True, 0.5),  # ended early
        ("572", True, 0.5),
        ("275", True, 0.25),  # all digits there, none in place
        ("x527", False, 0.0),  # shifted by one
        ("", True, 0.0),
        ("", False, 0.0),
    ],
)
def test_score_counts_correct_positions_and_the_end(response: str, finished: bool, score: float) -> None:
    assert character_score("527", response, finished) == score


def test_scores_keep_the_order_of_the_responses() -> None:
    prompts = [Prompt(12, "12>", "12"), Prompt(34, "34>", "34"), Prompt(56, "56>", "56")]
    scores = ArithmeticEnvironment().score(prompts, ["12", "99", "56"], [True, False, False])
    assert scores == pytest.approx([1.0, 0.0, 2 / 3])


def test_a_missing_response_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ArithmeticEnvironment().score([Prompt(1, "1>", "1"), Prompt(2, "2>", "2")], ["1"], [True])


def test_without_a_reader_of_answers_equal_texts_are_equal():
    found = votes_of(ArithmeticEnvironment(), ["12", "1", "12", "", ""])
    assert found == [Vote("12", 0), Vote("1", 1), Vote("12", 0), Vote("", 3), Vote("", 3)]


@pytest.mark.needs("math")
def test_mathematical_answers_are_equal_as_expressions():
    from nemo_rl_mcore.environment.mathematics import MathEnvironment

    said = [
        r"so \boxed{1/2}", "the answer is $0.5$", r"\boxed{\frac{2}{4}}", "12 apples", "",
        r"\boxed{\text{Monday}}", "the answer is Monday", "12",
    ]  # fmt: skip
    found = votes_of(MathEnvironment(5), said)
    assert [vote.first for vote in found] == [0, 0, 0, 3, None, 5, 5, 3]
    assert [vote.answer for vote in found][3:6] == ["12", None, "monday"]
