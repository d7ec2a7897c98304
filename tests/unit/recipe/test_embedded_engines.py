"""Embedded engines of their own: what the recipe says of them, and for which runs."""

from nemo_rl_mcore.recipe.rules.runs import run_problems

GENERATION = "policy.generation"
APART = f"{GENERATION}.colocated.enabled=false"
FOREIGN = ("+policy.model.qk_layernorm=true", "+policy.model.add_qkv_bias=true")


def test_the_ranks_answer_unless_a_recipe_asks_for_engines(load):
    generation = load().policy.generation
    assert generation.decodes_on_ranks
    assert generation.backend == "embedded"
    assert not load(APART).policy.generation.decodes_on_ranks
    vllm = load(f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2").policy.generation
    assert not vllm.decodes_on_ranks


def test_none_of_it_holds_where_the_ranks_answer(load):
    config = load(*FOREIGN, f"{GENERATION}.refit_transport=nccl")
    assert not [*run_problems(config)]
