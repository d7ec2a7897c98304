import sys

import pytest
from refusals import refused

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import first_turn
from nemo_rl_mcore.environment.games import (
    ArithmeticEnvironment,
    CalculatorEnvironment,
    GuessNumberEnvironment,
)
from nemo_rl_mcore.environment.interface import EnvironmentReturn, LocalEnvironments
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError

PROMPTS = [Prompt(7, "1>", "1"), Prompt(8, "2>", "2")]


def make(**sections):
    return make_environment(EnvConfig.model_validate(sections))


def test_without_another_the_environment_is_that_of_the_embedded_tasks():
    assert type(make()) is ArithmeticEnvironment


@pytest.mark.parametrize(
    ("section", "kind"), [("guess_number", GuessNumberEnvironment), ("calculator", CalculatorEnvironment)]
)
def test_tasks_of_several_turns_have_environments_of_their_own(section, kind):
    assert type(make(**{section: {}})) is kind


def test_a_class_of_ones_own_scores():
    environment = make(custom={"type": "custom_parts:LengthReward", "args": {"wanted": 1}})
    assert environment.score(PROMPTS, ["1", "22"], [True, True]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "code", "parts"),
    [
        ([1.0], "reward-count", (1, 2, "[1.0]")),
        (None, "reward-count", ("None", 2)),
        ([1.0, float("nan")], "reward-number", (8, "nan")),
        ([float("-inf"), 0.0], "reward-number", (7, "-inf")),
        (["one", 0.0], "reward-number", (7, "'one'")),
        ([None, 0.0], "reward-number", (7, "None")),
    ],
)
def test_scores_that_cannot_be_rewards_name_the_class(scores, code, parts):
    environment = make(custom={"type": "custom_parts:BadReward", "args": {"scores": scores}})
    with refused(code, "env.custom.type: custom_parts:BadReward", *parts, by=CustomCodeError):
        environment.score(PROMPTS, ["1", "2"], [True, True])


@pytest.mark.parametrize("kept", [[True, False], [False, False]])
def test_scores_of_none_are_not_scored_where_the_recipe_says_so(kept):
    scores = [1.0 if one else None for one in kept]
    own = {"type": "custom_parts:BadReward", "args": {"scores": scores}}
    environment = make(custom=own, unscored="drop")
    assert environment.score(PROMPTS, ["1", "2"], [True, True]) == scores
    found = LocalEnvironments(environment).replies([first_turn(prompt, "1") for prompt in PROMPTS])
    assert [reply.unscored for reply in found] == [not one for one in kept]
    own["args"] = {"scores": [float("nan"), None]}
    with refused("reward-number", 7, by=CustomCodeError):
        make(custom=own, unscored="drop").score(PROMPTS, ["1", "2"], [True, True])


LOGS = [[{"role": "user", "content": "1>"}, {"role": "assistant", "content": "22", "finished": True}]]


def test_a_class_of_ones_own_takes_part_in_episodes():
    environment = make(custom={"type": "custom_parts:Steps"})
    returned = environment.step(LOGS, ["kept"])
    assert returned.rewards == {"length": [2.0]}
    assert returned.metadata == ["kept"]
    assert not hasattr(environment, "score")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (([None], [None], [None], [1.0, 2.0], [True]), ["AttributeError"]),
        (EnvironmentReturn([None], [None], [None], [1.0, 2.0], [True]), ["rewards", 2]),
        (EnvironmentReturn([None], [None], [None], [float("nan")], [True]), ["nan"]),
        (EnvironmentReturn([{"role": "user"}], [None], [None], [1.0], [False]), ["KeyError: 'content'"]),
    ],
)
def test_a_return_that_cannot_be_read_names_class_and_method(returned, message):
    environment = make(custom={"type": "custom_parts:Steps", "args": {"returned": returned}})
    where = "env.custom.type: custom_parts:Steps.step "
    with refused("environment-return", where, 1, *message, by=CustomCodeError):
        environment.step(LOGS, [None])


def test_a_step_whose_reward_is_none_is_not_scored_where_the_recipe_says_so():
    returned = EnvironmentReturn([None], [None], [None], {"length": [None]}, [True])
    own = {"type": "custom_parts:Steps", "args": {"returned": returned}}
    with refused("environment-return", "None", by=CustomCodeError):
        make(custom=own).step(LOGS, [None])
    environment = make(custom=own, unscored="drop")
    [reply] = LocalEnvironments(environment).replies([first_turn(PROMPTS[0], "1")])
    assert (reply.unscored, reply.reward, reply.rewards) == (True, 0.0, {})


def test_what_a_step_raises_names_class_and_method():
    environment = make(custom={"type": "custom_parts:RaisingSteps"})
    with refused("custom-code-raised", "custom_parts:RaisingSteps.step", "KeyError: 'no such tool'"):
        environment.step(LOGS, [None])


def test_a_class_with_neither_method_is_refused():
    with refused("missing-member", "custom_parts:Neither", "score or step"):
        make(custom={"type": "custom_parts:Neither"})


@pytest.mark.parametrize(
    ("type", "weights", "known"),
    [
        ("custom_parts:Steps", {"lenght": 2.0}, "length"),
        ("custom_parts:LengthReward", {"length": 2.0}, "without a name"),
    ],
)
def test_weights_of_rewards_that_there_are_not_are_named(type, weights, known):
    environment = LocalEnvironments(make(custom={"type": type}), weights)
    name = next(iter(weights))
    with refused("unknown-reward", f"env.reward_weights.{name}", known, by=RunStoppedError):
        environment.replies([first_turn(PROMPTS[0], "22")])


def test_weights_make_the_reward_and_leave_its_parts():
    environment = LocalEnvironments(make(custom={"type": "custom_parts:Steps"}), {"length": 2.0})
    [reply] = environment.replies([first_turn(PROMPTS[0], "22")])
    assert (reply.reward, reply.rewards) == (4.0, {"length": 2.0})
    assert (environment.take_counts(), environment.drop_reasons) == ({}, {})


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with refused("missing-package", "env.math: ", "math_verify", "extra math"):
        make(math={})
