"""Which smaller number of machines a recipe goes on with."""

import pytest

from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.runs import shrunk

MEGATRON = "policy.megatron_cfg"
ELASTIC = ("cluster.elastic=shrink", "cluster.max_trainer_restarts=1", "checkpointing.enabled=true")
ONE_RANK_EACH = ("cluster.cpu_workers_per_node=1", "policy.train_micro_batch_size=32")
EXPERTS = (
    "policy.model.num_moe_experts=8",
    "policy.model.tie_word_embeddings=false",
    f"{MEGATRON}.expert_model_parallel_size=4",
)


@pytest.fixture
def elastic(load):
    return lambda *overrides: load(*ELASTIC, *ONE_RANK_EACH, *overrides)


@pytest.mark.parametrize(
    ("overrides", "left", "expected"),
    [
        (["cluster.num_nodes=4"], 3, 2),  # 256 samples do not divide by 3
        (["cluster.num_nodes=4"], 1, 1),
        (["cluster.num_nodes=4"], 4, 2),  # fewer than its own, however many there are
        (["cluster.num_nodes=4"], 0, None),
        (["cluster.num_nodes=3", "grpo.num_prompts_per_step=18", "policy.train_global_batch_size=288"], 2, 2),
        (["cluster.num_nodes=4", f"{MEGATRON}.tensor_model_parallel_size=2"], 3, 2),
        (["cluster.num_nodes=4", f"{MEGATRON}.tensor_model_parallel_size=2"], 1, None),
        (["cluster.num_nodes=4", f"{MEGATRON}.pipeline_model_parallel_size=2"], 3, 2),
        (["cluster.num_nodes=8", *EXPERTS], 7, 4),
        (["cluster.num_nodes=8", *EXPERTS], 3, None),
        (["cluster.num_nodes=4", "cluster.cpu_workers_per_node=2"], 3, 2),
        (["cluster.num_nodes=4", "policy.dynamic_batching.enabled=true"], 3, 2),
        (["cluster.num_nodes=4", "policy.generation.colocated.enabled=false"], 3, 2),
    ],
)
def test_the_largest_number_that_the_rules_allow(elastic, overrides, left, expected):
    config = elastic(*overrides)
    smaller = shrunk(config, left)
    if expected is None:
        assert smaller is None
        return
    assert smaller is not None
    assert smaller.cluster == config.cluster.model_copy(update={"num_nodes": expected})
    assert smaller == config.model_copy(update={"cluster": smaller.cluster})


@pytest.mark.parametrize("recipe", ["ppo_cpu.yaml", "distillation_cpu.yaml", "sft_cpu.yaml", "dpo_cpu.yaml"])
def test_recipes_of_every_algorithm_shrink(exemplar, recipe):
    """Second models are cut as the policy is, on the same machines."""
    overrides = (*ELASTIC, "cluster.cpu_workers_per_node=1", "cluster.num_nodes=2")
    config = load_config(exemplar.with_name(recipe), overrides)
    smaller = shrunk(config, 1)
    assert smaller is not None
    assert {name: plan.policy for name, plan in smaller.models.items()} == {
        name: plan.policy for name, plan in config.models.items()
    }
    assert (config.data_parallel_size, smaller.data_parallel_size) == (2, 1)


def test_what_has_shrunk_may_shrink_again(elastic):
    first = shrunk(elastic("cluster.num_nodes=4"), 2)
    assert first is not None
    second = shrunk(first, 1)
    assert second is not None
    assert second.cluster.num_nodes == 1
    assert shrunk(second, 1) is None
