import json

import pytest
from said_turns import play

from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.environment.games import CalculatorEnvironment

TOOL = CalculatorEnvironment()
PROMPT = Prompt(3725, "37+25>", "00062")


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
    played = play(TOOL, PROMPT, answers)
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
        ("", None),
        ("+5", None),
        ("5+", None),
        ("5++5", None),
        ("5-3", None),
        ("5 + 3", None),
        ("2**9", None),
        ("__import__", None),
        ("٣+1", None),
        ("9" * 9, 999999999),
        ("9" * 10, None),
    ],
)
def test_only_sums_are_understood(text, value):
    assert play(TOOL, PROMPT, [f"{text}$"]).observations == ["e>" if value is None else f"{value:05d}>"]


def test_the_state_of_a_task_is_plain_data():
    (reply,) = play(TOOL, PROMPT, ["37+25$"]).replies
    assert json.loads(json.dumps(reply.metadata)) == reply.metadata
