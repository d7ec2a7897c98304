"""policy.offload is refused where nobody has use for the memory, and where somebody else would keep it."""

import pytest

from nemo_rl_mcore.recipe.load import load_config

COLOCATED = ("policy.generation.backend=vllm", "policy.model.num_attention_heads=2")
ALONE = (*COLOCATED, "policy.generation.compare_at_start=false")
APART = (*COLOCATED, "policy.generation.colocated.enabled=false")


@pytest.mark.parametrize(
    ("recipe", "offload", "overrides"),
    [
        ("grpo_copy_cpu.yaml", "grads_optimizer", ()),
        ("grpo_copy_cpu.yaml", "grads_optimizer", APART),
        ("grpo_copy_cpu.yaml", "all", ALONE),
        ("ppo_cpu.yaml", "grads_optimizer", ()),
        ("dpo_cpu.yaml", "grads_optimizer", ()),
        ("distillation_cpu.yaml", "grads_optimizer", ()),
    ],
)
def test_it_goes_with_ranks_that_read_or_engines_that_take_turns(exemplar, recipe, offload, overrides):
    config = load_config(exemplar.with_name(recipe), [f"policy.offload={offload}", *overrides])
    assert all(plan.policy.offload == offload for plan in config.models.values())


@pytest.mark.parametrize("place", ["true", "false"])
@pytest.mark.parametrize(
    "recipe", ["grpo_copy_cpu.yaml", "ppo_cpu.yaml", "sft_cpu.yaml", "distillation_cpu.yaml"]
)
def test_a_place_for_a_reference_that_is_not_there_is_a_warning(warnings, recipe, place):
    assert warnings(f"policy.reference_on_device={place}", recipe=recipe) == [
        "policy.reference_on_device: has-no-effect"
    ]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("dpo_cpu.yaml", ()), ("grpo_copy_cpu.yaml", ("loss_fn.reference_policy_kl_penalty=0.1",))],
)
def test_a_reference_has_a_place(exemplar, recipe, overrides):
    config = load_config(exemplar.with_name(recipe), ["policy.reference_on_device=false", *overrides])
    assert config.policy.reference_on_device is False
