"""Asynchronous rollouts: what it refuses when the recipe loads, and what it goes with."""

import pytest
from refusals import wrong_key

from nemo_rl_mcore.config import AsyncRolloutsConfig, checked
from nemo_rl_mcore.config.run_config import GroupLimits
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.rollouts import remarks
from nemo_rl_mcore.tools.migrate.migrate import migrate

ASYNC = "grpo.async_grpo"
GENERATION = "policy.generation"
APART = f"{GENERATION}.colocated.enabled=false"
ON = f"{ASYNC}.enabled=true"
CHOSEN = "loss_fn.use_importance_sampling_correction=true"
TIS = (
    CHOSEN,
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
)
RUN = (ON, APART, *TIS)
VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")


def test_it_is_off_unless_a_recipe_asks_for_it(load):
    config = load()
    assert not config.asynchronous
    assert config.max_age == 0
    assert not config.streams


def test_defaults_are_one_step_of_age_and_whole_steps(load):
    config = load(*RUN)
    assert config.grpo.async_grpo == config.asynchrony == AsyncRolloutsConfig(enabled=True)
    assert config.asynchrony.in_flight_weight_updates
    assert config.group_limits == GroupLimits(32, 32, 16)


@pytest.mark.parametrize(
    ("overrides", "live", "inflight", "chunk", "streams"),
    [
        (["max_trajectory_age_steps=0"], 16, 16, 16, False),
        (["max_trajectory_age_steps=2", "max_inflight_prompts=20"], 48, 20, 16, False),
        (["max_inflight_prompts=999", "min_groups_for_streaming_train=4"], 32, 32, 4, True),
        (["min_groups_for_streaming_train=16"], 32, 32, 16, False),
    ],
)
def test_what_is_under_way(load, overrides, live, inflight, chunk, streams):
    config = load(*RUN, *(f"{ASYNC}.{override}" for override in overrides))
    assert config.group_limits == GroupLimits(live, inflight, chunk)
    assert config.streams == streams


LEFT_OUT = (ON, APART)


def test_off_policy_a_correction_is_a_choice_of_the_recipe(load, refusals):
    assert refusals(*LEFT_OUT) == ["loss_fn.use_importance_sampling_correction: missing (enabled)"]
    assert not any(remarks(load(*LEFT_OUT, *TIS)))
    (remark,) = remarks(load(*LEFT_OUT, "loss_fn.use_importance_sampling_correction=false"))
    assert remark.startswith("loss_fn.use_importance_sampling_correction: false: ")
    wrong = refusals(*LEFT_OUT, "loss_fn.use_importance_sampling_correction=maybe")
    assert wrong == ["loss_fn.use_importance_sampling_correction: not-allowed"]


def test_on_policy_there_is_no_correction_to_choose(load):
    config = load(*LEFT_OUT, f"{ASYNC}.max_trajectory_age_steps=0")
    assert config.max_age == 0
    assert not any(remarks(config))


def test_a_saved_recipe_is_the_same(load, tmp_path):
    saved = tmp_path / "config.yaml"
    config = load(*RUN, f"{ASYNC}.max_trajectory_age_steps=2")
    saved.write_text(recipe_text(config))
    assert load_config(saved) == config


@pytest.fixture
def ask(exemplar):
    """Load the CPU recipe of another algorithm, with asynchronous rollouts on."""

    def load_other(algorithm: str, *overrides: str):
        path = exemplar.with_name(f"{algorithm}_cpu.yaml")
        on = (f"{algorithm}.async_{algorithm}.enabled=true", APART)
        return load_config(path, [*on, *(TIS if algorithm == "ppo" else ()), *overrides])

    return load_other


OTHERS = ("ppo", "dpo", "distillation")


@pytest.mark.parametrize("algorithm", OTHERS)
def test_every_algorithm_that_samples_has_it(ask, algorithm):
    config = ask(algorithm, f"{algorithm}.async_{algorithm}.max_trajectory_age_steps=2")
    assert config.asynchronous
    assert config.key("asynchrony") == f"{algorithm}.async_{algorithm}"
    assert (config.max_age, config.prompts_per_step, config.group_limits.live) == (2, 64, 3 * 64)
    assert not config.streams
    assert not any(remarks(config))


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "sft", "distillation"])
def test_the_section_of_another_algorithm_is_none(exemplar, algorithm):
    other, asks = exemplar.with_name(f"{algorithm}_cpu.yaml"), f"+{algorithm}.async_grpo.enabled=true"
    with wrong_key(f"{algorithm}.async_grpo.enabled: foreign-recipe (enabled)"):
        load_config(other, [asks])
    (problem,) = [one for one in migrate(other, [asks]).problems if "async_grpo" in one.path]
    assert (problem.path, problem.code) == (f"{algorithm}.async_grpo", "not-supported")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([f"{ASYNC}.in_flight_weight_updates=false"], f"{ASYNC}.in_flight_weight_updates: false"),
        (
            [*VLLM, f"{GENERATION}.vllm_cfg.async_engine=true"],
            f"{ASYNC}.recompute_kv_cache_after_weight_updates: false",
        ),
        (
            [
                *("policy.model.num_moe_experts=4", "policy.model.qk_layernorm=true"),
                *("policy.model.moe_aux_loss_coeff=0.1", f"{ASYNC}.min_groups_for_streaming_train=4"),
            ],
            "policy.model.moe_aux_loss_coeff: ",
        ),
    ],
)
def test_what_is_worth_a_word(load, overrides, told):
    (remark,) = remarks(load(*RUN, *overrides))
    assert remark.startswith(told)
    assert not any(remarks(load(*RUN, *overrides, f"{ASYNC}.enabled=false")))


def test_the_section_can_be_built_alone():
    AsyncRolloutsConfig(rollout_timeout_s=9.0, stall_timeout_s=5.0)  # which nothing reads
    with wrong_key("stall_timeout_s: too-small (rollout_timeout_s)"):
        checked(
            AsyncRolloutsConfig, AsyncRolloutsConfig(enabled=True, rollout_timeout_s=9.0, stall_timeout_s=5.0)
        )
