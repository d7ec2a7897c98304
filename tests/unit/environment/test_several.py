"""Several environments in a run: each row's own one replies to it, and what is counted is counted of each."""

import asyncio
from dataclasses import replace

import pytest
import torch
from refusals import briefs, refused

from nemo_rl_mcore.config import ConfigError, EnvConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.sources import RowLimits
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.algorithms.algorithm import rollout_metrics
from nemo_rl_mcore.driver.rollouts.player import EnvironmentsByName, Rollout, RolloutCollector
from nemo_rl_mcore.environment.turns import Ending, Reply, first_turn
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings

ROWS = "data={dataset_name: files, max_input_seq_length: 4, train: [{data_path: a, env_name: %s}, {data_path: b%s}]}"
TWO = "env={rewards: {long: 'custom_parts:length'}, custom: {type: 'custom_parts:LengthReward'}}"


class Gives:
    """An `Environments` whose rewards are its number and the prompt's; it drops odd prompts."""

    def __init__(self, number):
        self.number, self.drop_reasons = number, {"it died": number}

    def replies(self, turns):
        numbers = [turn.prompt.index for turn in turns]
        return [Reply(self.number + one, dropped="it died" if one % 2 else None) for one in numbers]

    async def replies_soon(self, turns):
        await asyncio.sleep(0.01 / self.number)
        return self.replies(turns)

    def take_counts(self):
        return {"env/dropped": float(self.number)}


BOTH = EnvironmentsByName({"math": Gives(100), "code": Gives(200)})


def prompts(*names):
    return [Prompt(index, f"{index}>", "", env_name=name) for index, name in enumerate(names)]


def test_each_turn_is_replied_to_by_the_environment_of_its_row_in_order():
    turns = [first_turn(prompt, "!") for prompt in prompts("code", "math", "code", "math")]
    assert [reply.reward for reply in BOTH.replies(turns)] == [200, 101, 202, 103]
    assert asyncio.run(BOTH.replies_soon(turns)) == BOTH.replies(turns)
    assert BOTH.take_counts() == {"env/dropped": 300, "env/math/dropped": 100, "env/code/dropped": 200}
    assert BOTH.drop_reasons == {"it died": 300}
    assert EnvironmentsByName({"": Gives(1)}).take_counts() == {"env/dropped": 1}


def rollout(*rows, named=()):
    """A rollout of one-token answers; rows: environment, reward, and how the episode ended."""
    names, rewards, endings = zip(*rows, strict=True)
    rewards = torch.tensor(rewards)
    batch = BatchedDataDict(
        input_ids=torch.ones(len(rows), 2, dtype=torch.long),
        input_lengths=torch.full((len(rows),), 2),
        token_mask=torch.tensor([[0.0, 1.0]] * len(rows)),
        rewards=rewards,
        ending=torch.tensor(endings),
        finished=torch.tensor([one == Ending.TERMINATED for one in endings]),
        prompt_index=torch.arange(len(rows)),
        advantages=rewards[:, None].expand(-1, 2) - 1,
        replies=[[{"rewards": {"form": 1.0}} if name in named else {"dropped": "it died"}] for name in names],
    )
    if named:
        batch["rewards/form"] = torch.tensor([float(name in named) for name in names])
    return Rollout(batch, prompts(*names), ["!"] * len(rows))


ENDED, CUT, DROPPED = Ending.TERMINATED, Ending.ANSWER_LIMIT, Ending.DROPPED


def test_what_is_measured_is_measured_of_each_environment_too():
    found = rollout_metrics(
        rollout(("math", 1.0, ENDED), ("code", 4.0, CUT), ("code", 2.0, ENDED), named=["code"])
    )
    of_all = {"train/reward": 7 / 3, "train/truncation_rate": 1 / 3, "train/advantages_mean": 4 / 3}
    of_code = {
        "train/env/code/reward": 3,
        "train/env/code/truncation_rate": 0.5,
        "train/env/code/advantages_mean": 2,
    }
    for name, value in (
        of_all | of_code | {"train/env/math/reward_max": 1, "rewards/env/code/form_mean": 1}
    ).items():
        assert found[name] == pytest.approx(value), name
    assert not {"rewards/form_mean", "rewards/env/math/form_mean"} & found.keys(), (
        "no zeros of another environment"
    )
    alone = rollout_metrics(rollout(("", 1.0, ENDED), ("", 4.0, CUT), named=[""]))
    assert not [name for name in alone if "env/" in name]
    assert alone["rewards/form_mean"] == 1


def test_the_limit_on_drops_holds_for_each_environment():
    player = RolloutCollector(None, None, 0, BOTH, max_drop_rate=0.5)
    kept = [("math", 1.0, ENDED)] * 6
    player.check_drops(3, [rollout(*kept, ("code", 0.0, DROPPED), ("code", 0.0, ENDED))])
    chunks = [rollout(*kept, ("code", 0.0, DROPPED)), rollout(("code", 0.0, DROPPED), ("code", 0.0, ENDED))]
    with refused("too-many-dropped", "step 3, env.code", "2 of 3", "it died", by=RunStoppedError):
        player.check_drops(3, chunks)


def test_each_environment_has_its_section_and_its_weights():
    given = {
        "math": {},
        "rewards": {"long": "a:b"},
        "custom": {"type": "a:C"},
        "reward_weights": {"long": 2, "new": 3},
    }
    config = EnvConfig.model_validate(given)
    assert {name: (one.given, one.reward_weights) for name, one in config.by_name.items()} == {
        "math": (["math"], {}), "rewards": (["rewards"], {"long": 2}), "custom": (["custom"], {"new": 3}),
    }  # fmt: skip
    one = EnvConfig.model_validate({"math": {}})
    assert one.by_name == {"": one}


def test_rows_name_their_environment_where_there_are_several(exemplar):
    def wrong(*overrides):
        try:
            return briefs(load_with_warnings(exemplar, overrides)[1])
        except ConfigError as error:
            return briefs(error.problems)

    assert wrong(ROWS % ("rewards", ", env_name: custom"), TWO) == []
    assert wrong(ROWS % ("rewards", ""), TWO) == ["data.train.1.env_name: missing (rewards)"]
    assert (
        wrong(ROWS % ("rewards", ", env_name: coda"), TWO)[0] == "data.train.1.env_name: not-found (rewards)"
    )
    assert wrong(ROWS % ("rewards", ", env_name: rewards"), TWO) == ["env.custom: has-no-effect"]
    assert wrong(TWO) == ["env.custom: one-of (rewards)"], "an embedded task's rows name none"
    assert wrong(ROWS % ("math", ""), "env={math: {}}") == [], "NeMo RL's recipes of one environment name it"
    estimator = "grpo.adv_estimator.name=gdpo"
    given = ROWS % ("rewards", ", env_name: custom"), TWO, estimator
    assert "grpo.adv_estimator.name: incompatible (rewards)" in wrong(*given)


def test_a_prompt_of_ones_own_class_names_one_of_them(exemplar):
    several = load_config(exemplar, [ROWS % ("rewards", ", env_name: custom"), TWO])
    limits = RowLimits(several, load_tokenizer("char"))
    prompt = Prompt(0, "1>", "1", env_name="custom")
    assert limits.whole(prompt, sampled=True).env_name == "custom"
    with refused("unknown-environment", "'coda'", "rewards"):
        limits.whole(replace(prompt, env_name="coda"), sampled=True)
    alone = RowLimits(load_config(exemplar), load_tokenizer("char"))
    assert alone.whole(prompt, sampled=True).env_name == "", "metrics have no name of an only environment"
