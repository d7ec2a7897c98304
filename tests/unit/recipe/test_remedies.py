"""Whoever follows a remedy is not sent back, nor told to change weights, nor told of consequences beside the cause."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from refusals import assert_holds, brief

from nemo_rl_mcore.recipe.sources import Recipe, places

MEGATRON = "policy.megatron_cfg"
LENGTH = "policy.max_total_sequence_length"


@pytest.mark.parametrize("computed", ["data.max_input_seq_length", "policy.generation.max_new_tokens"])
def test_room_is_not_made_by_what_the_recipe_computes_the_lengths_from(wrong, computed):
    (problem,) = wrong(f"{LENGTH}=16", f"++{computed}=16")
    assert_holds(problem.remedy, 16)
    assert LENGTH not in problem.remedy


def test_room_is_not_made_beyond_the_positions_of_the_model(wrong):
    (problem,) = wrong(f"{LENGTH}=32", "policy.generation.max_new_tokens=30")
    assert_holds(problem.remedy, 32)
    (*_, beyond) = wrong(f"{LENGTH}=33", "policy.generation.max_new_tokens=30")
    assert_holds(beyond.remedy, 32)


def test_a_batch_size_that_is_proposed_is_taken(wrong, load):
    given = ("cluster.cpu_workers_per_node=4", "grpo.num_prompts_per_step=3")
    (problem,) = wrong(*given, "policy.train_global_batch_size=6")
    assert brief(problem) == "policy.train_global_batch_size: not-divisible (num_prompts_per_step)"
    assert_holds(problem.remedy, 48, 4)
    load(*given, "policy.train_global_batch_size=4")


def test_samples_that_no_batch_size_shares_out_are_the_one_thing_told(refusals):
    found = refusals("cluster.cpu_workers_per_node=3", "policy.train_global_batch_size=100")
    assert found == ["grpo.num_prompts_per_step: not-divisible (num_prompts_per_step)"]


def test_one_batch_size_serves_the_samples_and_the_loss(wrong, load):
    on_policy = "loss_fn.force_on_policy_ratio=true"
    (problem,) = wrong("policy.train_global_batch_size=100", on_policy)
    assert_holds(problem.remedy, 256)
    load("policy.train_global_batch_size=256", on_policy)


def test_bounds_of_importance_weights_are_not_sent_to_a_correction_that_is_off(wrong, load):
    bound = "loss_fn.truncated_importance_sampling_ratio=2"
    kind = "loss_fn.truncated_importance_sampling_type=tis"
    (problem,) = wrong(bound)
    assert_holds(problem.remedy, "null", "type: tis", "use_importance_sampling_correction: true")
    load(bound, kind, "loss_fn.use_importance_sampling_correction=true")
    (problem,) = wrong(bound, kind)
    assert_holds(problem.remedy, "truncated_importance_sampling_type: null", "no bounds")


def test_sgd_is_not_sent_to_the_sharded_optimizer_that_cannot_be_saved(wrong):
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    (problem,) = wrong(
        *(
            f"{ddp}.overlap_param_gather=true",
            f"{ddp}.overlap_grad_reduce=true",
            "checkpointing.enabled=true",
        ),
        *(f"{MEGATRON}.use_fused_linear_logprobs=false", f"{MEGATRON}.optimizer.optimizer=sgd"),
        f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
    )
    assert_holds(problem.remedy, "overlap_param_gather: false")


def test_a_policy_gradient_without_answers_is_switched_off_with_its_section(wrong):
    problems = wrong(
        "++distillation.on_policy=false",
        "++distillation.num_generations_per_prompt=1",
        "++loss_fn.rl_weight=0.5",
        "++loss_fn.rl.entropy_coef=0.1",
        recipe="distillation_cpu.yaml",
    )
    (remedy,) = [problem.remedy for problem in problems if problem.path == "loss_fn.rl_weight"]
    assert_holds(remedy, "rl_weight: 0", "remove loss_fn.rl")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "policy.model.vocab_size=31",
            "policy.tokenizer.name: contradicts (init_checkpoint)",
        ),
        (
            "policy.generation.stop_token_ids=[40]",
            "policy.generation.stop_token_ids: too-large (vocab_size)",
        ),
        (
            "policy.generation.backend=vllm",
            "policy.model.num_attention_heads: too-small (model)",
        ),
    ],
)
def test_loaded_weights_are_not_what_is_to_change(refusals, override, told):
    assert refusals("+policy.init_checkpoint=step_7", override) == [told]


def test_a_section_is_not_the_key_that_was_meant_inside_it(wrong):
    (problem,) = wrong("+policy.generation.vllm_cfg.show_bars=true")
    assert brief(problem) == "policy.generation.vllm_cfg.show_bars: unknown-key"
    assert_holds(problem.remedy, "policy.generation.vllm_cfg", "async_engine")


def test_heads_that_follow_others_are_not_told_beside_them(refusals):
    texts = refusals(f"{MEGATRON}.tensor_model_parallel_size=8", "cluster.cpu_workers_per_node=8")
    assert [text.partition(":")[0] for text in texts] == ["policy.model.num_attention_heads"]


def test_the_size_of_a_task_is_not_judged_where_no_task_is_named(refusals):
    texts = refusals("~data.dataset_name", "grpo.max_val_samples=256")
    assert [text.partition(":")[0] for text in texts] == ["data.dataset_name"]


def test_an_override_with_spaces_says_so(wrong):
    (problem,) = wrong("grpo.max_num_steps = 3")
    assert brief(problem) == "grpo.max_num_steps = 3: not-allowed"
    assert_holds(problem.remedy, "key=value", "spaces")


def test_a_prompt_file_is_not_dropped_without_what_it_said(refusals):
    assert refusals("+data.default.prompt_file=cot.txt") == ["data.default: incompatible (dataset_name)"]


def test_a_section_set_to_null_is_no_place_of_its_keys(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("policy:\n  model: null\n")
    found = places(Recipe(OmegaConf.create(), (Path(exemplar), recipe)), [])
    assert "policy.model.num_layers" not in found
    assert found["policy.model"].endswith("/recipe.yaml:2")
    assert Path(found["policy.precision"]).name.startswith("grpo_copy_cpu.yaml:")
