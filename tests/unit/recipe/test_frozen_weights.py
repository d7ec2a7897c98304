"""Patterns of names that training leaves as they are: what is refused at load, and what `check` counts."""

import pytest

from nemo_rl_mcore.models import all_weights
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.models.memory import estimate_memory

FREEZE = "policy.megatron_cfg.freeze"
EXPERTS = ["policy.model.num_moe_experts=4", "policy.model.qk_layernorm=true"]


def frozen(*patterns):
    return f"{FREEZE}=[{','.join(f"'{one}'" for one in patterns)}]"


@pytest.mark.parametrize(
    ("patterns", "model", "count"),
    [
        (["model.embed_tokens.weight"], [], 1),
        (["model.layers.0.*"], [], 6),
        (["*"], [], 2 * 6 + 3),
        (["*.[qkv]_proj.weight"], [], 2),
        (["*.mlp.experts.*"], EXPERTS, 2 * 2 * 4),
        (["*.block_sparse_moe.*"], EXPERTS[:1], 2 * (2 * 4 + 1)),
    ],
)
def test_patterns_are_of_the_names_of_hugging_face_models(load, patterns, model, count):
    policy = load(frozen(*patterns), *model).policy
    assert len(frozen_of(policy)) == count
    assert frozen_of(policy) <= {*all_weights(policy.model)}


def test_routers_are_frozen_by_name_or_by_their_own_key(load):
    by_key = load("policy.megatron_cfg.freeze_moe_router=true", *EXPERTS).policy
    by_name = load(frozen("*.mlp.gate.weight"), *EXPERTS).policy
    assert frozen_of(by_key) == frozen_of(by_name)
    assert len(frozen_of(by_key)) == 2


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["model.embed_tokens.weight"], 86_336 - 32 * 64),
        (["model.layers.1.*"], 86_336 - 41_088),
        (["*layernorm*", "model.norm.weight"], 86_336 - 5 * 64),
    ],
)
def test_memory_has_neither_gradients_nor_moments_of_them(load, patterns, trained):
    memory = estimate_memory(load(frozen(*patterns)))["policy"]
    assert (memory.rank_parameters, memory.weights) == (86_336, 86_336 * 4)
    assert (memory.gradients, memory.optimizer) == (trained * 4, 2 * trained * 4 // 2)


def test_memory_has_the_biases_of_experts_in_fp32_and_trains_none(load):
    model = [*EXPERTS, "policy.model.moe_router_score_function=sigmoid", "policy.precision=bfloat16"]
    plain, biased = (
        estimate_memory(load(*model, f"policy.model.moe_router_enable_expert_bias={has}"))["policy"]
        for has in ("false", "true")
    )
    assert biased.rank_parameters == plain.rank_parameters + 2 * 4
    assert biased.weights == plain.weights + 2 * 4 * 4
    assert (biased.gradients, biased.optimizer) == (plain.gradients, plain.optimizer)
