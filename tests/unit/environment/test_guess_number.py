import json
from itertools import pairwise

import pytest
from said_turns import play

from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.environment.games import GuessNumberEnvironment

GAME = GuessNumberEnvironment()
PROMPT = Prompt(185, "18>", "5")
"""One of eight numbers."""


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


def test_the_state_of_a_game_is_plain_data():
    (reply,) = play(GAME, PROMPT, ["4$"]).replies
    assert json.loads(json.dumps(reply.metadata)) == reply.metadata
