"""The engine and the ranks may share their GPUs: the one sleeps whenever the others compute, in every algorithm."""

import pytest
from algorithm_fakes import (
    TOKENIZER,
    FakePolicy,
    Notes,
    assert_ranks_and_engine_take_turns,
    collector,
    recipe,
    source,
    train,
)
from test_distillation import FakeTeacher
from test_ppo import FakeCritic

from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.driver.algorithms.distillation import DistillationTrainer
from nemo_rl_mcore.driver.algorithms.dpo import DPOTrainer
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.algorithms.ppo import PPOTrainer
from nemo_rl_mcore.driver.algorithms.sft import SFTTrainer

VALIDATED = {
    "max_num_steps": 3,
    "val_period": 2,
    "val_at_start": True,
    "val_at_end": True,
    "max_val_samples": 2,
}
ONLINE = {"num_generations_per_prompt": 2}
GIVEN = {"on_policy": False, "num_generations_per_prompt": 1}
PENALTY = {"reference_policy_kl_penalty": 0.1}


def grpo(**keys):
    config, policy = recipe("grpo", grpo=VALIDATED | keys, loss_fn=PENALTY), FakePolicy()
    return policy, GRPOTrainer(config, policy, collector(config, policy), source(config), Notes())


def ppo():
    config, policy = recipe("ppo", ppo=VALIDATED, loss_fn=PENALTY), FakePolicy()
    critic = FakeCritic(policy.calls)
    return policy, PPOTrainer(
        config, policy, collector(config, policy), source(config), Notes(), critic=critic
    )


def dpo(policy_keys=None, **keys):
    config, policy = recipe("dpo", policy_keys, dpo=VALIDATED | keys), FakePolicy()
    prompts = source(config)
    pairs = (
        None if config.dpo.num_generations_per_prompt else PreferenceSource(prompts, TOKENIZER, made_up=True)
    )
    return policy, DPOTrainer(config, policy, collector(config, policy), prompts, Notes(), pairs=pairs)


def sft():
    config, policy = recipe("sft", sft=VALIDATED), FakePolicy()
    return policy, SFTTrainer(config, policy, collector(config, policy), source(config), Notes())


def distillation(**keys):
    config, policy = recipe("distillation", distillation=VALIDATED | keys), FakePolicy()
    teacher = FakeTeacher(policy.calls)
    parts = config, policy, collector(config, policy), source(config), Notes()
    return policy, DistillationTrainer(*parts, teacher=teacher)


@pytest.mark.parametrize(
    "make",
    [
        *(grpo, ppo, dpo, sft, distillation),
        lambda: grpo(use_dynamic_sampling=True),
        lambda: dpo(**ONLINE),
        lambda: distillation(**GIVEN),
    ],
    ids=[
        "grpo",
        "ppo",
        "dpo",
        "sft",
        "distillation",
        "dynamic sampling",
        "dpo online",
        "distillation off policy",
    ],
)
def test_ranks_and_engine_take_turns(make):
    policy, algorithm = make()
    train(algorithm)
    assert len([call for call in policy.calls if call == "train"]) == 3
    assert_ranks_and_engine_take_turns(policy.calls)
