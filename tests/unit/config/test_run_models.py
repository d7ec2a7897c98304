"""The models of a run: which there are, and that each meets the rules of a policy, told by the recipe's keys."""

from pathlib import Path

import pytest
from refusals import briefs

from nemo_rl_mcore.config import ConfigError, Role
from nemo_rl_mcore.config.master import reader_of_prev_logprobs, source_of_prev_logprobs
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.models.memory import estimate_memory
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

EXEMPLARS = Path(__file__).parents[3] / "examples/configs"
EXEMPLAR_OF = {
    name: EXEMPLARS / f"{name}_cpu.yaml" for name in ("grpo_copy", "ppo", "dpo", "sft", "distillation")
}
MEGATRON = "policy.megatron_cfg"
TP = f"{MEGATRON}.tensor_model_parallel_size"
DENSE = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: 128, vocab_size: 32"


def teacher(**sizes):
    """An override that gives the teacher an architecture of its own."""
    given = "".join(f", {key}: {value}" for key, value in sizes.items())
    return f"+teacher.model={{{DENSE}{given}}}"


@pytest.mark.parametrize(
    ("algorithm", "models"),
    [
        ("grpo_copy", {"policy": (Role.POLICY, True, False)}),
        ("sft", {"policy": (Role.POLICY, True, False)}),
        ("dpo", {"policy": (Role.POLICY, True, True)}),
        ("ppo", {"policy": (Role.POLICY, True, False), "value": (Role.VALUE, True, False)}),
        ("distillation", {"policy": (Role.POLICY, True, False), "teacher": (Role.POLICY, False, False)}),
    ],
)
def test_the_models_of_an_algorithm(algorithm, models):
    config = load_config(EXEMPLAR_OF[algorithm])
    found = {name: (plan.role, plan.trained, plan.reference) for name, plan in config.models.items()}
    assert found == models
    assert [plan.name for plan in config.models.values()] == [*models]
    assert config.models["policy"].policy is config.policy


def test_rules_of_training_are_not_put_to_a_frozen_model():
    """The schedule that overlaps the experts' communication is that of training."""
    overlapped = [
        f"{MEGATRON}.overlap_moe_expert_parallel_comm=true",
        *("policy.precision=bfloat16", "policy.model.num_moe_experts=4"),
        f"{MEGATRON}.expert_model_parallel_size=2",
        teacher(num_moe_experts=4, moe_ffn_hidden_size=32, mtp_num_layers=2),
    ]
    plan = load_config(EXEMPLAR_OF["distillation"], overlapped).models["teacher"]
    assert not plan.trained
    assert not plan.policy.megatron_cfg.overlap_moe_expert_parallel_comm


def test_the_memory_of_a_run_is_that_of_all_its_models():
    config = load_config(EXEMPLARS / "recipes/llm/distillation-qwen3-8b-to-0.6b-1n8g-megatron-fused.yaml")
    memory = estimate_memory(config)
    policy, teacher = memory["policy"], memory["teacher"]
    # 8.2 billion weights in 16 bits, alone; a trained model of that size would need eight times as much.
    assert teacher.parameters > 8.1e9
    assert teacher.weights == 2 * teacher.rank_parameters
    assert (teacher.gradients, teacher.optimizer, teacher.reference) == (0, 0, 0)
    assert teacher.logits > 0
    assert teacher.total == teacher.weights + teacher.logits
    assert min(policy.gradients, policy.optimizer) > 0
    assert [*memory] == ["policy", "teacher"]


def test_a_critic_has_an_optimizer_and_no_logits():
    memory = estimate_memory(load_config(EXEMPLAR_OF["ppo"]))
    assert memory["value"].gradients == memory["policy"].gradients
    assert memory["value"].optimizer == memory["policy"].optimizer
    assert memory["value"].logits == 0


def test_a_teachers_checkpoint_is_looked_at_before_the_run(tmp_path):
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "config.yaml").write_text(recipe_text(load_config(EXEMPLAR_OF["sft"])))
    given = [f"teacher.init_checkpoint={folder}"]
    preflight(load_config(EXEMPLAR_OF["distillation"], given))
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(EXEMPLAR_OF["distillation"], [*given, teacher(num_layers=4)]))
    assert briefs(caught.value.problems) == ["teacher.init_checkpoint: other-model"]


def test_weights_of_a_checkpoint_are_used_under_layouts_that_only_the_other_model_refuses(tmp_path):
    config = load_config(EXEMPLAR_OF["distillation"], [teacher(hidden_size=60, num_attention_heads=6)])
    (tmp_path / "config.yaml").write_text(recipe_text(config))
    loaded = load_recipe_of(tmp_path, [f"{TP}=4", "cluster.cpu_workers_per_node=4"])
    preflight(loaded, of_a_run=False)
    assert loaded.policy.init_checkpoint == str(tmp_path)


OFF_POLICY = (
    "distillation.on_policy=false distillation.num_generations_per_prompt=1 policy.train_global_batch_size=64 "
    "policy.logprob_batch_size=32 policy.train_micro_batch_size=32"
)


@pytest.mark.parametrize(
    ("recipe", "overrides", "temperature"),
    [
        ("grpo_copy", "", 0.7),
        ("ppo", "", 0.7),
        ("dpo", "", 0.7),
        ("dpo", "dpo.num_generations_per_prompt=null", 1.0),
        ("sft", "", 1.0),
        ("distillation", "distillation.on_policy=true", 0.7),
        ("distillation", OFF_POLICY, 1.0),
    ],
)
def test_given_answers_are_read_at_temperature_1_and_sampled_ones_at_that_of_sampling(
    recipe, overrides, temperature
):
    given = load_config(EXEMPLAR_OF[recipe], ["policy.generation.temperature=0.7", *overrides.split()])
    assert given.logprob_sampling.temperature == temperature


ONE_STEP = "policy.train_global_batch_size=256 ppo.ppo_epochs"
MISMATCH = "policy.generation.mismatch_threshold=1.5 policy.generation.mismatch_action"
IN_REWARD = "loss_fn.use_kl_in_reward=true grpo.adv_estimator.name=reinforce_plus_plus"


@pytest.mark.parametrize(
    ("recipe", "overrides", "reader"),
    [
        ("grpo_copy", "", None),
        ("grpo_copy_async", "", None),
        ("grpo_copy", "policy.recompute_prev_logprobs=always", "policy.recompute_prev_logprobs: always"),
        ("grpo_copy", "policy.train_global_batch_size=128", "2 optimizer steps over each rollout"),
        ("grpo_copy", "loss_fn.reference_policy_kl_penalty=0.1", None),
        (
            "grpo_copy",
            f"loss_fn.reference_policy_kl_penalty=0.1 {IN_REWARD}",
            "loss_fn.use_kl_in_reward: true",
        ),
        ("grpo_copy", MISMATCH.rpartition(" ")[0], None),
        ("grpo_copy", f"{MISMATCH}=mask", "policy.generation.mismatch_action: mask"),
        ("grpo_copy", f"{MISMATCH}=stop", "policy.generation.mismatch_action: stop"),
        ("grpo_copy", "loss_fn.type=custom_parts:Loss", "loss_fn.type: custom_parts:Loss"),
        ("ppo", f"{ONE_STEP}=1", None),
        ("ppo", f"{ONE_STEP}=2", "2 optimizer steps over each rollout"),
        (
            "ppo",
            f"{ONE_STEP}=1 value_loss_fn.type=custom_parts:Loss",
            "value_loss_fn.type: custom_parts:Loss",
        ),
        ("ppo", f"{ONE_STEP}=1 ppo.critic_warmup_steps=3", "ppo.critic_warmup_steps, which train no policy"),
    ],
)
def test_a_recipe_says_whether_a_pass_is_needed(recipe, overrides, reader):
    config = load_config(EXEMPLARS / f"{recipe}_cpu.yaml", overrides.split())
    assert config.samples_per_step == 256
    assert reader_of_prev_logprobs(config) == reader


def test_a_distillation_with_rewards_runs_the_pass():
    rewards = ["loss_fn.rl_weight=0.5", "loss_fn.rl.reference_policy_kl_penalty=0.0"]
    config = load_config(EXEMPLAR_OF["distillation"], rewards)
    assert source_of_prev_logprobs(config) == "a pass before training, for loss_fn.rl_weight"
