"""Whoever follows a remedy is not sent back, nor told to change weights, nor told of consequences beside the cause."""

import pytest

from nemo_rl_mcore.config import Problem
from nemo_rl_mcore.config.sources import locate

MEGATRON = "policy.megatron_cfg"
LENGTH = "policy.max_total_sequence_length"


@pytest.mark.parametrize("computed", ["data.max_input_seq_length", "policy.generation.max_new_tokens"])
def test_room_is_not_made_by_what_the_recipe_computes_the_lengths_from(refusals, computed):
    (text,) = refusals(f"{LENGTH}=16", f"++{computed}=16")
    assert text.endswith("; lower the other two, which together may be 16")


def test_room_is_not_made_beyond_the_positions_of_the_model(refusals):
    (text,) = refusals(f"{LENGTH}=32", "policy.generation.max_new_tokens=30")
    assert text.endswith("; lower the other two, which together may be 32")
    beyond = refusals(f"{LENGTH}=33", "policy.generation.max_new_tokens=30")
    assert any(text.endswith("together may be 32") for text in beyond)


def test_a_batch_size_that_is_proposed_is_taken(refusals, load):
    given = ("cluster.cpu_workers_per_node=4", "grpo.num_prompts_per_step=3")
    (text,) = refusals(*given, "policy.train_global_batch_size=6")
    assert text == (
        "policy.train_global_batch_size: 6 is not divisible by the 4 data-parallel ranks; set it to a multiple that "
        "divides the 48 samples of a step (grpo.num_prompts_per_step * grpo.num_generations_per_prompt), such as 4"
    )
    load(*given, "policy.train_global_batch_size=4")


def test_samples_that_no_batch_size_shares_out_are_the_one_thing_told(refusals):
    (text,) = refusals("cluster.cpu_workers_per_node=3", "policy.train_global_batch_size=100")
    assert text == (
        "grpo.num_prompts_per_step: the 256 samples of a step (grpo.num_prompts_per_step * "
        "grpo.num_generations_per_prompt) are not divisible by the 3 data-parallel ranks; change their number, or "
        "that of the ranks"
    )


def test_one_batch_size_serves_the_samples_and_the_loss(refusals, load):
    on_policy = "loss_fn.force_on_policy_ratio=true"
    (text,) = refusals("policy.train_global_batch_size=100", on_policy)
    assert text.endswith("set it to a divisor, such as 256")
    load("policy.train_global_batch_size=256", on_policy)


def test_bounds_of_importance_weights_are_not_sent_to_a_correction_that_is_off(refusals, load):
    bound = "loss_fn.truncated_importance_sampling_ratio=2"
    kind = "loss_fn.truncated_importance_sampling_type=tis"
    (text,) = refusals(bound)
    assert text.endswith(
        "set the bounds to null, or truncated_importance_sampling_type: tis with use_importance_sampling_correction: "
        "true"
    )
    load(bound, kind, "loss_fn.use_importance_sampling_correction=true")
    (text,) = refusals(bound, kind)
    assert text.endswith("or truncated_importance_sampling_type: null and no bounds")


def test_sgd_is_not_sent_to_the_sharded_optimizer_that_cannot_be_saved(refusals):
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    (text,) = refusals(
        *(
            f"{ddp}.overlap_param_gather=true",
            f"{ddp}.overlap_grad_reduce=true",
            "checkpointing.enabled=true",
        ),
        *(f"{MEGATRON}.use_fused_linear_logprobs=false", f"{MEGATRON}.optimizer.optimizer=sgd"),
        f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
    )
    assert text.endswith("; set overlap_param_gather: false")


def test_a_policy_gradient_without_answers_is_switched_off_with_its_section(refusals):
    texts = refusals(
        "++distillation.on_policy=false",
        "++distillation.num_generations_per_prompt=1",
        "++loss_fn.rl_weight=0.5",
        "++loss_fn.rl.entropy_coef=0.1",
        recipe="distillation_cpu.yaml",
    )
    assert any("set rl_weight: 0 and remove loss_fn.rl, or" in text for text in texts)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "policy.model.vocab_size=31",
            "policy.tokenizer.name: char has 32 tokens, and the weights (policy.init_checkpoint) have 31; name the "
            "tokenizer of the weights",
        ),
        (
            "policy.generation.stop_token_ids=[40]",
            "policy.generation.stop_token_ids: [40] is outside 0 to 31, the ids of policy.model.vocab_size: 32; "
            "remove them",
        ),
        (
            "policy.generation.backend=vllm",
            "policy.model.num_attention_heads: the head size 16 is below 32, the smallest of vLLM on CPU "
            "(policy.generation.backend: vllm, cluster.gpus_per_node: 0); set backend: embedded",
        ),
    ],
)
def test_loaded_weights_are_not_what_is_to_change(refusals, override, told):
    assert refusals("+policy.init_checkpoint=step_7", override) == [told]


def test_a_section_is_not_the_key_that_was_meant_inside_it(refusals):
    (text,) = refusals("+policy.generation.vllm_cfg.show_bars=true")
    key = "policy.generation.vllm_cfg"
    assert text.startswith(f"{key}.show_bars: unknown key; known keys of {key}: async_engine, ")


def test_heads_that_follow_others_are_not_told_beside_them(refusals):
    texts = refusals(f"{MEGATRON}.tensor_model_parallel_size=8", "cluster.cpu_workers_per_node=8")
    assert [text.partition(":")[0] for text in texts] == ["policy.model.num_attention_heads"]


def test_the_size_of_a_task_is_not_judged_where_no_task_is_named(refusals):
    texts = refusals("~data.dataset_name", "grpo.max_val_samples=256")
    assert [text.partition(":")[0] for text in texts] == ["data.dataset_name"]


def test_an_override_with_spaces_says_so(refusals):
    (text,) = refusals("grpo.max_num_steps = 3")
    assert text.endswith("; write key=value, without spaces around =")


def test_a_prompt_file_is_not_dropped_without_what_it_said(refusals):
    (text,) = refusals("+data.default.prompt_file=cot.txt")
    assert text.startswith("data.default: does nothing with dataset_name: copy")


def test_a_section_set_to_null_is_no_place_of_its_keys(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("policy:\n  model: null\n")
    problems = [
        Problem("missing", "policy.model.num_layers", ""),
        Problem("missing", "policy.model", ""),
        Problem("missing", "policy.precision", ""),
    ]
    places = [problem.where.rpartition("/")[2] for problem in locate(problems, [exemplar, recipe], [])]
    assert places[:2] == ["", "recipe.yaml:2"]
    assert places[2].startswith("grpo_copy_cpu.yaml:")
