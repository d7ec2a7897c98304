import pytest
from refusals import refusals_of, wrong_key

from nemo_rl_mcore.config import (
    AdvantageEstimatorConfig,
    GRPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
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


def test_shorthands_reach_the_estimator():
    config = GRPOConfig.model_validate({**SIZES, "normalize_rewards": False})
    assert config.adv_estimator.normalize_rewards is False
    assert config.adv_estimator.use_leave_one_out_baseline is True
    assert config.samples_per_step == 8


def test_contradicting_shorthand_is_refused():
    given = {**SIZES, "normalize_rewards": False, "adv_estimator": {"normalize_rewards": True}}
    with wrong_key("normalize_rewards: contradicts (normalize_rewards)"):
        checked(GRPOConfig, given)


@pytest.mark.parametrize(
    "estimator", [{"type": "mine:Estimator"}, {"name": "reinforce_plus_plus", "minus_baseline": False}]
)
def test_one_answer_to_each_prompt_serves_an_estimator_that_compares_none(estimator):
    checked(GRPOConfig, {**SIZES, "num_generations_per_prompt": 1, "adv_estimator": estimator})


def test_a_built_estimator_is_kept():
    estimator = AdvantageEstimatorConfig(name="reinforce_plus_plus", minus_baseline=False)
    assert GRPOConfig(**SIZES, adv_estimator=estimator).adv_estimator == estimator


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adv_estimator": {"name": "gae"}}, "adv_estimator.name: incompatible"),
        (
            {"use_dynamic_sampling": True, "num_generations_per_prompt": 1},
            "use_dynamic_sampling: no-signal (num_generations_per_prompt)",
        ),
        ({"num_generations_per_prompt": 1}, "num_generations_per_prompt: no-signal (name)"),
        (
            {"num_generations_per_prompt": 1, "adv_estimator": {"name": "reinforce_plus_plus"}},
            "num_generations_per_prompt: no-signal (name)",
        ),
        (
            {"reward_scaling": {"enabled": True, "source_min": 1.0}},
            "reward_scaling.source_max: too-small (source_min)",
        ),
        (
            {"reward_shaping": {"enabled": True}},
            "reward_shaping.max_response_length: missing (enabled)",
        ),
        (
            {"reward_shaping": {"enabled": True, "max_response_length": 64}},
            "reward_shaping.overlong_buffer_length: too-large (max_response_length)",
        ),
        ({"num_prompts_per_step": 0}, "num_prompts_per_step: not-allowed"),
    ],
)
def test_grpo_refusals(given, message):
    assert refusals_of(lambda: checked(GRPOConfig, {**SIZES, **given})) == [message]


def test_disabled_rewards_sections_are_not_judged():
    assert RewardScalingConfig(source_min=1.0, source_max=0.0).enabled is False
    assert RewardShapingConfig(max_response_length=1).enabled is False


@pytest.mark.parametrize(
    ("recipe", "overrides", "temperature"),
    [
        ("grpo_copy_cpu", [], 0.7),
        ("ppo_cpu", [], 0.7),
        ("dpo_cpu", [], 0.7),
        ("dpo_cpu", ["dpo.online=false", "dpo.num_generations_per_prompt=null"], 1.0),
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
