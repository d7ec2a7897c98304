import sys

import pytest

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environments import (
    ArithmeticEnvironment,
    CalculatorEnvironment,
    GuessNumberEnvironment,
    make_environment,
)

PROMPTS = [Prompt(7, "1>", "1"), Prompt(8, "2>", "2")]


def make(**sections):
    return make_environment(EnvConfig.model_validate(sections))


@pytest.mark.parametrize("sections", [{}, {"arithmetic": {}}])
def test_without_another_the_environment_is_that_of_the_embedded_tasks(sections):
    assert type(make(**sections)) is ArithmeticEnvironment


@pytest.mark.parametrize(
    ("section", "kind"), [("guess_number", GuessNumberEnvironment), ("calculator", CalculatorEnvironment)]
)
def test_tasks_of_several_turns_have_environments_of_their_own(section, kind):
    assert type(make(**{section: {}})) is kind


def test_a_class_of_ones_own_scores():
    environment = make(custom={"type": "custom_parts:LengthReward", "args": {"wanted": 1}})
    assert environment.score(PROMPTS, ["1", "22"], [True, True]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], r"env\.custom\.type: custom_parts:BadReward gave 1 scores of 2 responses"),
        ([1.0, float("nan")], r"custom_parts:BadReward scored nan for prompt 8"),
        ([float("-inf"), 0.0], r"scored -inf for prompt 7"),
    ],
)
def test_scores_that_cannot_be_rewards_name_the_class(scores, message):
    environment = make(custom={"type": "custom_parts:BadReward", "args": {"scores": scores}})
    with pytest.raises(ValueError, match=message):
        environment.score(PROMPTS, ["1", "2"], [True, True])


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ValueError, match=r"env\.math: needs the Python package math_verify .* install the extra math"
    ):
        make(math={})
