"""Whoever follows a remedy is not sent back, nor told to change weights, nor told of consequences beside the cause."""

from pathlib import Path

from omegaconf import OmegaConf
from refusals import assert_holds, brief

from nemo_rl_mcore.recipe.sources import Recipe, places

LENGTH = "policy.max_total_sequence_length"


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


def test_a_section_set_to_null_is_no_place_of_its_keys(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("policy:\n  model: null\n")
    found = places(Recipe(OmegaConf.create(), (Path(exemplar), recipe)), [])
    assert "policy.model.num_layers" not in found
    assert found["policy.model"].endswith("/recipe.yaml:2")
    assert Path(found["policy.precision"]).name.startswith("grpo_copy_cpu.yaml:")
