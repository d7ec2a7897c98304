"""The models of a run: which there are, and that each meets the rules of a policy, told by the recipe's keys."""

from pathlib import Path

import pytest
from refusals import briefs

from nemo_rl_mcore.config import ConfigError, Role
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.models.memory import estimate_memory
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

EXEMPLARS = Path(__file__).parents[3] / "examples/configs"
EXEMPLAR_OF = {
    "grpo": EXEMPLARS / "grpo_copy_cpu.yaml",
    "ppo": EXEMPLARS / "ppo_cpu.yaml",
    "dpo": EXEMPLARS / "dpo_cpu.yaml",
    "sft": EXEMPLARS / "sft_cpu.yaml",
    "distillation": EXEMPLARS / "distillation_cpu.yaml",
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
        ("grpo", {"policy": (Role.POLICY, True, False)}),
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


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
EP2 = f"{MEGATRON}.expert_model_parallel_size=2"


@pytest.mark.parametrize(
    "overrides",
    [
        # A dense teacher has no use for the ranks that share experts.
        ["policy.model.num_moe_experts=4", EP2, teacher()],
        # Only in training do experts need the sequence to be split.
        [f"{TP}=2", teacher(**EXPERTS)],
        # The engine answers with the policy's weights, never with the teacher's.
        [
            "policy.generation.backend=vllm",
            "policy.model.num_attention_heads=2",
            teacher(add_qkv_bias="true", qk_layernorm="true"),
        ],
        # The schedule that overlaps the experts' communication is that of training.
        [
            f"{MEGATRON}.overlap_moe_expert_parallel_comm=true",
            "policy.precision=bfloat16",
            "policy.model.num_moe_experts=4",
            EP2,
            teacher(**EXPERTS, mtp_num_layers=2),
        ],
    ],
)
def test_rules_of_training_are_not_put_to_a_frozen_model(overrides):
    plan = load_config(EXEMPLAR_OF["distillation"], overrides).models["teacher"]
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


@pytest.mark.parametrize(
    ("algorithm", "of_the_run", "of_the_command"),
    [
        (
            "distillation",
            [teacher(hidden_size=60, num_attention_heads=6)],
            [f"{TP}=4", "cluster.cpu_workers_per_node=4"],
        ),
    ],
)
def test_weights_of_a_checkpoint_are_used_under_layouts_that_only_the_other_model_refuses(
    algorithm, of_the_run, of_the_command, tmp_path
):
    config = load_config(EXEMPLAR_OF[algorithm], of_the_run)
    (tmp_path / "config.yaml").write_text(recipe_text(config))
    loaded = load_recipe_of(tmp_path, of_the_command)
    preflight(loaded, of_a_run=False)
    assert loaded.policy.init_checkpoint == str(tmp_path)
