import sys

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import handed
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.games import (
    ArithmeticEnvironment,
    CalculatorEnvironment,
    GuessNumberEnvironment,
)
from nemo_rl_mcore.environment.interface import EnvironmentReturn, LocalEnvironments, replies_of
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.environment.turns import first_turn
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError

PROMPTS = [Prompt(7, "1>", "1"), Prompt(8, "2>", "2")]


def make(**sections):
    return make_environment(EnvConfig.model_validate(sections))


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, ArithmeticEnvironment),
        ({"guess_number": {}}, GuessNumberEnvironment),
        ({"calculator": {}}, CalculatorEnvironment),
    ],
)
def test_embedded_tasks_have_environments_of_their_own(section, kind):
    assert type(make(**section)) is kind


def test_a_class_of_ones_own_scores():
    environment = make(custom={"type": "custom_parts:LengthReward", "args": {"wanted": 1}})
    assert environment.score(PROMPTS, ["1", "22"], [True, True]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "code", "parts"),
    [
        ([1.0], "reward-count", (1, 2, "[1.0]")),
        (None, "reward-count", ("None", 2)),
        (0.25, "reward-count", ("0.25", 2)),
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


TARGETS = [Prompt(7, "12>", "12", columns={"target": "129"}), Prompt(8, "34>", "34", columns={"target": "3"})]
RESPONSES = ["12", "43"]


def of(*names: str) -> RewardFunctions:
    paths = {name: f"custom_parts:{name}" for name in names}
    return make_environment(EnvConfig(rewards=paths))


def replies(environment: RewardFunctions, weights=None, responses=RESPONSES):
    turns = [
        first_turn(prompt, response, finished=True)
        for prompt, response in zip(TARGETS, responses, strict=True)
    ]
    return LocalEnvironments(environment, weights).replies(turns)


def test_rewards_have_names_and_their_weighted_sum_is_the_reward():
    weights = {"near": 3.0}
    found = replies(of("right", "near"), weights)
    assert [reply.rewards for reply in found] == [{"right": 1.0, "near": 2 / 3}, {"right": 0.0, "near": 0.0}]
    assert [reply.reward for reply in found] == [3.0, 0.0]
    assert all(reply.terminated for reply in found)


def test_a_coroutine_is_awaited_and_takes_all_columns():
    assert [reply.reward for reply in replies(of("awaited"))] == [3.0, 1.0]


def test_a_function_that_no_other_process_could_import_is_handed_over():
    with handed({"__main__:long": lambda responses: [float(len(one)) for one in responses]}):
        environment = RewardFunctions({"long": "__main__:long"})
    assert [reply.reward for reply in replies(environment, responses=["a", "ab"])] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "code"),
    [("custom_parts:by_place", "custom-arguments"), ("custom_parts:LengthReward", "no-function")],
)
def test_what_cannot_be_called_by_names_is_refused(path, code):
    with refused(code):
        RewardFunctions({"it": path})


@pytest.mark.parametrize(
    ("given", "code", "parts"),
    [([0.25], "reward-count", (2, "[0.25]")), ([1.0, None], "reward-number", (8, "None"))],
)
def test_what_is_no_number_an_answer_is_refused(given, code, parts):
    with handed({"__main__:it": lambda **_: given}):
        environment = RewardFunctions({"it": "__main__:it"})
    with refused(code, "env.rewards.it", *parts, by=CustomCodeError):
        replies(environment)


def test_what_a_function_raises_is_told_with_its_key():
    def fails(**_):
        raise KeyError("gone")

    with handed({"__main__:it": fails}):
        environment = RewardFunctions({"it": "__main__:it"})
    with refused("custom-code-raised", by=CustomCodeError):
        replies(environment)


def test_a_column_that_is_not_kept_is_refused():
    functions = of("right", "near")
    require_columns(functions, {"data.train": ("target", "other")})
    with refused("unknown-column"):
        require_columns(functions, {"data.train": ("target",), "data.validation": ()})


def test_an_answer_with_a_reward_of_none_is_not_scored_where_the_recipe_says_so():
    functions = {"__main__:some": lambda **_: [1.0, None], "__main__:all": lambda **_: [0.5, 0.5]}
    with handed(functions):
        section = {"rewards": {path[9:]: path for path in functions}, "unscored": "drop"}
        environment = make_environment(EnvConfig.model_validate(section))
    scored, unscored = replies(environment)
    assert (scored.reward, scored.rewards, scored.unscored) == (1.5, {"some": 1.0, "all": 0.5}, False)
    assert (unscored.reward, unscored.rewards, unscored.unscored) == (0.0, {}, True)


TURN = first_turn(Prompt(3, "1>", "1"), "2")


class Saying:
    def __init__(self, **changes):
        self.changes = changes

    def step(self, message_log_batch, metadata):
        assert message_log_batch[0][-1] == {"role": "assistant", "content": "2", "finished": True}
        assert metadata[0]["answer"] == "1"
        said = {
            "observations": [{"role": "user", "content": "3>"}],
            "metadata": [None],
            "next_stop_strings": [["#"]],
            "rewards": torch.tensor([0.5]),
            "terminateds": torch.tensor([False]),
        }
        return EnvironmentReturn(**{**said, **self.changes})


def test_what_is_right_is_a_reply():
    [reply] = replies_of(Saying(answers=["2"]), [TURN], {})
    assert (reply.reward, reply.terminated, reply.stop_strings, reply.answer) == (0.5, False, ("#",), "2")
    assert [message.content for message in reply.observation] == ["3>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": [{"role": "user", "content": None}]}, "an observation: None is not a string"),
        ({"observations": [{"role": 1, "content": "a"}]}, "an observation's role: 1 is not a string"),
        ({"observations": [{"role": "r" * 101, "content": "a"}]}, "role has 101 characters"),
        ({"observations": [{"role": "user", "content": "\ud83d"}]}, "surrogates not allowed"),
        ({"next_stop_strings": ["</call>"]}, "next_stop_strings: '</call>' is one text"),
        ({"next_stop_strings": [[""]]}, "an empty text would end every answer"),
        ({"answers": [torch.tensor(1)]}, "answers: tensor"),
        ({"terminateds": torch.tensor([True, False])}, "terminateds: 2 values for 1 answers"),
        ({"rewards": torch.tensor([float("nan")])}, "not finite"),
    ],
)
def test_what_is_wrong_is_told_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replies_of(Saying(**changes), [TURN], {})


@pytest.mark.parametrize("name", ["a\n\x1b[2J/b", "\u202eevil", "a\tb", 3])
def test_a_reward_has_a_name_that_can_be_shown(name):
    with pytest.raises(RunStoppedError, match="printable") as stopped:
        replies_of(Saying(rewards={name: torch.tensor([1.0])}), [TURN], {})
    assert str(stopped.value).isprintable()


@pytest.mark.parametrize("name", ["length", "format/xml", "длина ответа"])
def test_other_names_pass(name):
    [reply] = replies_of(Saying(rewards={name: torch.tensor([1.0])}), [TURN], {})
    assert reply.rewards == {name: 1.0}


@pytest.mark.parametrize(
    ("content", "kept", "cut"), [("abc", "abc", 0), ("abcd", "abc", 1), ("a" * 10**6, "aaa", 10**6 - 3)]
)
def test_of_a_long_observation_the_beginning_is_shown_and_the_rest_is_counted(content, kept, cut):
    said = Saying(observations=[{"role": "user", "content": content}])
    [reply] = replies_of(said, [TURN], {}, 3)
    assert (reply.observation[0].content, reply.cut) == (kept, cut)
    recorded = reply.to_json()
    assert recorded.get("cut", 0) == cut
