"""Plain functions as rewards."""

import pytest
from refusals import refused

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import handed
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.turns import first_turn
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import CustomCodeError

PROMPTS = [Prompt(7, "12>", "12", columns={"target": "129"}), Prompt(8, "34>", "34", columns={"target": "3"})]
RESPONSES = ["12", "43"]


def of(*names: str) -> RewardFunctions:
    paths = {name: f"custom_parts:{name}" for name in names}
    return make_environment(EnvConfig(rewards=paths))


def replies(environment: RewardFunctions, weights=None, responses=RESPONSES):
    turns = [
        first_turn(prompt, response, finished=True)
        for prompt, response in zip(PROMPTS, responses, strict=True)
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
    [
        ("custom_parts:by_place", "custom-arguments"),
        ("custom_parts:LengthReward", "no-function"),
    ],
)
def test_what_cannot_be_called_by_names_is_refused(path, code):
    with refused(code):
        RewardFunctions({"it": path})


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([0.25], "reward-count"),
        (None, "reward-count"),
        (0.25, "reward-count"),
        ([1.0, float("nan")], "reward-number"),
        ([1.0, None], "reward-number"),
    ],
)
def test_what_is_no_number_an_answer_is_refused(given, code):
    with handed({"__main__:it": lambda **_: given}):
        environment = RewardFunctions({"it": "__main__:it"})
    held = (2, 8)[code == "reward-number"]  # how many answers, or the prompt of the one
    came = str(given) if code == "reward-count" else str(given[1])
    with refused(code, "env.rewards.it", held, came, by=CustomCodeError):
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
