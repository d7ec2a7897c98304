"""Advantage estimators of the user's own."""

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of
from nemo_rl_mcore.errors import CustomCodeError
from nemo_rl_mcore.recipe.load import load_config


def recipe(algorithm: str, name: str, *more: str):
    exemplar = {"grpo": "grpo_copy_cpu.yaml", "ppo": "ppo_cpu.yaml"}[algorithm]
    path = f"+{algorithm}.adv_estimator.type=custom_parts:{name}"
    return load_config(exemplar, [path, *more])


def batch() -> BatchedDataDict:
    return BatchedDataDict(
        prompt_index=torch.tensor([0, 0]),
        sample_index=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, 0.0]),
        token_mask=torch.tensor([[0.0, 1, 1], [0, 1, 0]]),
        sample_mask=torch.ones(2),
        values=torch.full((2, 3), 0.25),
    )


def test_a_class_of_ones_own_takes_the_place_of_the_estimator():
    config, given = recipe("grpo", "MeanAdvantage", "+grpo.adv_estimator.args={factor: 2.0}"), batch()
    estimator_of(config, config.loss_fn).add_to(given)
    assert given["advantages"].equal(torch.tensor([[1.0, 1, 1], [-1, -1, -1]]))


def test_one_of_ppo_is_given_values_and_gives_returns():
    config, given = recipe("ppo", "CriticAdvantage"), batch()
    estimator_of(config, config.loss_fn).add_to(given)
    assert given["advantages"].equal(torch.tensor([[0.0, 0.75, 0.75], [0, -0.25, 0]]))
    assert given["returns"].equal(given["advantages"] + 0.25)


@pytest.mark.parametrize("name", ["ShortAdvantage", "EndlessAdvantage"])
def test_what_is_no_finite_number_a_token_is_refused(name):
    config = recipe("grpo", name)
    with refused("estimator-result", by=CustomCodeError):
        estimator_of(config, config.loss_fn).add_to(batch())


def test_a_class_without_the_method_is_refused_before_ranks_start():
    with refused("missing-member"):
        estimator_of(recipe("grpo", "LengthReward"), ClippedPGLossConfig())
