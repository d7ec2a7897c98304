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
