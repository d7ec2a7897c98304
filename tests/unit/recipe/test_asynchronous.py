"""Asynchronous rollouts: what it refuses when the recipe loads, and what it goes with."""

import pytest
from refusals import wrong_key

from nemo_rl_mcore.config import AsyncRolloutsConfig, checked
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
ON_GPUS = ("cluster.gpus_per_node=2", f"{GENERATION}.colocated.resources.gpus_per_node=1")
WHITENED = "grpo.adv_estimator.name=reinforce_plus_plus"


def test_it_is_off_unless_a_recipe_asks_for_it(load):
    config = load()
    assert not config.asynchronous
    assert not config.grpo.async_grpo.off_policy
    assert not config.streams


def test_defaults_are_one_step_of_age_and_whole_steps(load):
    config = load(*RUN)
    assert config.grpo.async_grpo == config.asynchrony == AsyncRolloutsConfig(enabled=True)
    assert config.asynchrony.in_flight_weight_updates
    assert (config.max_live_groups, config.max_inflight_groups, config.min_groups_per_chunk) == (32, 32, 16)


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
    assert (config.max_live_groups, config.max_inflight_groups) == (live, inflight)
    assert (config.min_groups_per_chunk, config.streams) == (chunk, streams)


@pytest.mark.parametrize("section", ["embedded_cfg", "vllm_cfg"])
def test_engines_may_start_anew(load, section):
    vllm = [*VLLM, f"{GENERATION}.vllm_cfg.async_engine=true"] if section == "vllm_cfg" else []
    config = load(*RUN, *vllm, f"{GENERATION}.{section}.max_restarts=2")
    assert getattr(config.policy.generation, section).max_restarts == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy.train_global_batch_size=64", f"{ASYNC}.min_groups_for_streaming_train=4"],
            "grpo.async_grpo.min_groups_for_streaming_train: incompatible (enabled)",
        ),
        (
            ["policy.train_global_batch_size=100"],
            "policy.train_global_batch_size: not-divisible (num_prompts_per_step)",
        ),
        (
            [f"{ASYNC}.min_groups_for_streaming_train=17"],
            "grpo.async_grpo.min_groups_for_streaming_train: too-large (num_prompts_per_step)",
        ),
        (
            [f"{ASYNC}.max_inflight_prompts=15"],
            "grpo.async_grpo.max_inflight_prompts: too-small (num_prompts_per_step)",
        ),
        (
            [f"{ASYNC}.rollout_timeout_s=30", f"{ASYNC}.stall_timeout_s=30"],
            "grpo.async_grpo.stall_timeout_s: too-small (rollout_timeout_s)",
        ),
        (
            [f"{GENERATION}.colocated.enabled=true"],
            "policy.generation.colocated.enabled: incompatible (enabled)",
        ),
        (
            list(VLLM),
            "policy.generation.vllm_cfg.async_engine: requires (enabled)",
        ),
        (
            [WHITENED, f"{ASYNC}.min_groups_for_streaming_train=4"],
            "grpo.async_grpo.min_groups_for_streaming_train: incompatible (enabled)",
        ),
        *(
            (
                [f"{GENERATION}.mismatch.threshold=1.1", f"{GENERATION}.mismatch.action={action}"],
                "policy.generation.mismatch.action: incompatible (threshold)",
            )
            for action in ("mask", "stop")
        ),
        (["+grpo.async_grpo.max_trainer_restarts=1"], "grpo.async_grpo.max_trainer_restarts: unknown-key"),
        ([f"{ASYNC}.max_trajectory_age_steps=-1"], "grpo.async_grpo.max_trajectory_age_steps: not-allowed"),
    ],
)
def test_refusals(refusals, overrides, message):
    (text,) = refusals(*RUN, *overrides)
    assert text.startswith(message)


@pytest.mark.parametrize(
    "remedy",
    [
        (APART, f"{GENERATION}.colocated.resources.gpus_per_node=1"),
        ("cluster.gpus_per_node=0",),  # where they are processes of their own
        (f"{ASYNC}.enabled=false",),
    ],
)
def test_engines_beside_the_ranks_gpus_are_not(load, remedy):
    load(ON, *TIS, *VLLM, f"{GENERATION}.vllm_cfg.async_engine=true", "cluster.gpus_per_node=2", *remedy)


def test_nothing_of_it_holds_of_a_run_that_takes_turns(load):
    load(
        "policy.train_global_batch_size=64",
        "grpo.use_dynamic_sampling=true",
        "grpo.dynamic_sampling_max_gen_batches=2",
        f"{ASYNC}.min_groups_for_streaming_train=99",
        f"{ASYNC}.max_inflight_prompts=1",
        f"{GENERATION}.mismatch={{threshold: 1.1, action: stop}}",
    )


class TestCorrection:
    LEFT_OUT = (ON, APART)

    def test_off_policy_it_is_a_choice_of_the_recipe(self, refusals):
        (text,) = refusals(*self.LEFT_OUT)
        assert text == ("loss_fn.use_importance_sampling_correction: missing (enabled)")

    def test_its_remedies_are_taken(self, load):
        assert not any(remarks(load(*self.LEFT_OUT, *TIS)))
        without = load(*self.LEFT_OUT, "loss_fn.use_importance_sampling_correction=false")
        (remark,) = remarks(without)
        assert remark.startswith(
            "loss_fn.use_importance_sampling_correction: false: older answers train as if"
        )

    def test_on_policy_there_is_nothing_to_choose(self, load):
        config = load(*self.LEFT_OUT, f"{ASYNC}.max_trajectory_age_steps=0")
        assert not config.grpo.async_grpo.off_policy
        assert not any(remarks(config))

    def test_a_wrong_choice_is_told_as_such(self, refusals):
        texts = refusals(*self.LEFT_OUT, "loss_fn.use_importance_sampling_correction=maybe")
        assert [text.partition(": ")[0] for text in texts] == ["loss_fn.use_importance_sampling_correction"]
        assert "loss_fn.use_importance_sampling_correction: not-allowed" in texts[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["+grpo.reward_shaping={enabled: true, max_response_length: 4, overlong_buffer_length: 2}"],
        ["+grpo.reward_scaling={enabled: true, target_max: 2.0}"],
        ["grpo.overlong_filtering=true"],
        ["grpo.val_at_start=true", "grpo.val_period=3"],
        ["+policy.init_checkpoint=step_7"],
        ["loss_fn.reference_policy_kl_penalty=0.1"],
        ["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.use_kl_in_reward=true", WHITENED],
        [WHITENED],
        ["loss_fn.force_on_policy_ratio=true"],
        ["max_consecutive_skips=1"],
        ["policy.sequence_packing.enabled=true", "policy.megatron_cfg.use_fused_linear_logprobs=false"],
        ["policy.sequence_packing.enabled=true", "+policy.megatron_cfg.fused_linear_logprobs_packed=true"],
        ["policy.dynamic_batching.enabled=true"],
        ["checkpointing.enabled=true", "checkpointing.resume=auto"],
        ["policy.megatron_cfg.tensor_model_parallel_size=2"],
        ["policy.megatron_cfg.pipeline_model_parallel_size=2"],
        [f"{GENERATION}.mismatch.threshold=1.1"],
        [f"{GENERATION}.mismatch={{threshold: 1.1, action: stop}}", f"{ASYNC}.max_trajectory_age_steps=0"],
        [f"{ASYNC}.rollout_timeout_s=30", f"{ASYNC}.stall_timeout_s=31"],
        ["cluster.gpus_per_node=2"],
        ["grpo.use_dynamic_sampling=true"],
    ],
)
def test_what_goes_with_it(load, overrides):
    streamed = f"{ASYNC}.min_groups_for_streaming_train=4"
    assert load(*RUN, *overrides).asynchronous
    if WHITENED not in overrides:
        assert load(*RUN, streamed, *overrides).streams


def test_a_saved_recipe_is_the_same(load, tmp_path):
    saved = tmp_path / "config.yaml"
    config = load(*RUN, f"{ASYNC}.max_trajectory_age_steps=2")
    saved.write_text(recipe_text(config))
    assert load_config(saved) == config


def test_several_optimizer_steps_train_on_a_rollout(load):
    assert load(*RUN, "policy.train_global_batch_size=64").samples_per_step == 4 * 64


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
    assert config.asynchrony_key == f"{algorithm}.async_{algorithm}"
    assert (config.max_age, config.prompts_per_step, config.max_live_groups) == (2, 64, 3 * 64)
    assert not config.streams
    assert not any(remarks(config))


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize(
    ("override", "key", "told"),
    [
        ("min_groups_for_streaming_train=4", "min_groups_for_streaming_train", "incompatible (enabled)"),
        ("min_groups_for_streaming_train=65", "min_groups_for_streaming_train", "too-large"),
        ("max_inflight_prompts=63", "max_inflight_prompts", "too-small"),
    ],
)
def test_refusals_name_the_section_of_the_algorithm(ask, algorithm, override, key, told):
    of_groups = "train_global_batch_size" if algorithm == "dpo" else "num_prompts_per_step"
    expected = told if "(" in told else f"{told} ({of_groups})"
    with wrong_key(f"{algorithm}.async_{algorithm}.{key}: {expected}"):
        ask(algorithm, f"{algorithm}.async_{algorithm}.{override}")


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
        (
            [f"{ASYNC}.in_flight_weight_updates=false"],
            f"{ASYNC}.in_flight_weight_updates: false: each update waits",
        ),
        (
            [*VLLM, f"{GENERATION}.vllm_cfg.async_engine=true"],
            f"{ASYNC}.recompute_kv_cache_after_weight_updates: false: vLLM engines recompute it all the same",
        ),
        (
            [
                *("policy.model.num_moe_experts=4", "policy.model.qk_layernorm=true"),
                *("policy.model.moe_aux_loss_coeff=0.1", f"{ASYNC}.min_groups_for_streaming_train=4"),
            ],
            f"policy.model.moe_aux_loss_coeff: the loss depends on how {ASYNC}.min_groups_for_streaming_train cuts",
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
