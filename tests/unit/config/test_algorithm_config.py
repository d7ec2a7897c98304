import pytest

from nemo_rl_mcore.config import (
    AdvantageEstimatorConfig,
    GRPOConfig,
    checked,
)
from nemo_rl_mcore.recipe.load import load_config

SIZES = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 3}


def test_estimator_defaults_are_those_of_the_conventions():
    assert AdvantageEstimatorConfig().model_dump() == {
        "name": "grpo",
        "use_leave_one_out_baseline": True,
        "normalize_rewards": True,
        "minus_baseline": True,
        "gae_lambda": 0.95,
        "gae_gamma": 1.0,
        "normalize_advantages": True,
        "gae_lambda_value": None,
        "gae_lambda_policy": None,
        "length_adaptive_alpha": 0.0,
    } | {"type": None, "args": None}  # ours


@pytest.mark.parametrize(
    "estimator", [{"type": "mine:Estimator"}, {"name": "reinforce_plus_plus", "minus_baseline": False}]
)
def test_one_answer_to_each_prompt_serves_an_estimator_that_compares_none(estimator):
    checked(GRPOConfig, {**SIZES, "num_generations_per_prompt": 1, "adv_estimator": estimator})


@pytest.mark.parametrize(
    ("recipe", "overrides", "temperature"),
    [
        ("grpo_copy_cpu", [], 0.7),
        ("ppo_cpu", [], 0.7),
        ("dpo_cpu", [], 0.7),
        ("dpo_cpu", ["dpo.num_generations_per_prompt=null"], 1.0),
        ("sft_cpu", [], 1.0),
        ("distillation_cpu", ["distillation.on_policy=true"], 0.7),
        (
            "distillation_cpu",
            [
                "distillation.on_policy=false",
                "distillation.num_generations_per_prompt=1",
                "policy.train_global_batch_size=64",
                "policy.logprob_batch_size=32",
                "policy.train_micro_batch_size=32",
            ],
            1.0,
        ),
    ],
)
def test_given_answers_are_read_at_temperature_1_and_sampled_ones_at_that_of_sampling(
    recipe, overrides, temperature
):
    given = load_config(f"examples/configs/{recipe}.yaml", ["policy.generation.temperature=0.7", *overrides])
    assert given.logprob_temperature == temperature
