import copy

import pytest
from refusals import wrong_key

from nemo_rl_mcore.config import (
    MegatronConfig,
    ModelConfig,
    PolicyConfig,
)
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.recipe.rules.policies import checked_policy


@pytest.fixture
def policy(tree):
    return tree["policy"]


def with_values(section, **values):
    """A copy of a tree with dotted paths (double underscores) set."""
    changed = copy.deepcopy(section)
    for path, value in values.items():
        *parents, key = path.split("__")
        node = changed
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return changed


def test_sizes_derived_from_the_model():
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=32)
    assert (model.shape.head_dim, model.shape.query_groups, model.shape.ffn_size) == (16, 4, 256)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        # Per layer: QKV and projection 4 * 64^2, gated feed-forward 3 * 64 * 128, two norms of 64.
        ({}, 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 2 * 32 * 64 + 64),
        ({"tie_word_embeddings": True}, 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 32 * 64 + 64),
        ({"num_query_groups": 2}, 2 * (3 * 64**2 + 3 * 64 * 128 + 2 * 64) + 2 * 32 * 64 + 64),
        (
            {"qk_layernorm": True, "add_qkv_bias": True},
            2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64 + 2 * 16 + 3 * 64) + 2 * 32 * 64 + 64,
        ),
    ],
)
def test_parameter_count(extra, expected):
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, vocab_size=32, **extra
    )
    assert count_parameters(model) == expected


def test_parameter_count_of_experts_and_prediction_layers():
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 24}
    model = ModelConfig.model_validate({**sizes, **experts, "mtp_num_layers": 1})
    # Attention, eight experts with the router, the shared expert, two norms; three of these layers.
    layer = 4 * 64**2 + 8 * (3 * 64 * 16 + 64) + 3 * 64 * 24 + 2 * 64
    assert count_parameters(model) == 3 * layer + (2 * 64 * 64 + 3 * 64) + 2 * 32 * 64 + 64
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    assert count_parameters(model.model_copy(update=bias)) == count_parameters(model) + 3 * 8


def test_logprob_batch_size_follows_the_training_micro_batch(policy):
    del policy["logprob_batch_size"]
    assert PolicyConfig.model_validate(policy).logprob_batch_size == policy["train_micro_batch_size"]
    assert PolicyConfig.model_validate({**policy, "logprob_batch_size": 4}).logprob_batch_size == 4


def test_a_warm_up_may_start_at_the_peak():
    given = {"optimizer": {"lr": 1e-3}, "scheduler": {"lr_warmup_init": 1e-3}}
    assert MegatronConfig.model_validate(given).scheduler.lr_warmup_init == 1e-3


def test_fused_guardrails_hold_without_the_loader(policy):
    with wrong_key("megatron_cfg.use_fused_linear_logprobs: incompatible (top_k)"):
        checked_policy(with_values(policy, generation__top_k=5))


def test_fused_goes_with_temperature_and_unfused_with_filtering(load):
    assert load("policy.generation.temperature=0.7").policy.generation.temperature == 0.7
    unfused = "policy.megatron_cfg.use_fused_linear_logprobs=false"
    assert load(unfused, "policy.generation.top_k=5").policy.generation.top_k == 5


def test_stop_tokens_may_be_any_id_of_the_model(policy):
    values = {"generation__stop_token_ids": [0, 31]}
    assert PolicyConfig.model_validate(with_values(policy, **values)).generation.stop_token_ids == (0, 31)


OVERLAPPED = (
    "policy.megatron_cfg.overlap_moe_expert_parallel_comm=true",
    "policy.model.num_moe_experts=4",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "policy.precision=bfloat16",
)


def test_overlapped_expert_communication(load):
    assert load(*OVERLAPPED).policy.megatron_cfg.overlap_moe_expert_parallel_comm


def test_experts_are_whole_on_their_rank_but_the_shared_expert_is_split(policy):
    layout = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": True}
    experts = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 5, "model__ffn_hidden_size": 5}
    assert PolicyConfig.model_validate(with_values(policy, **layout, **experts))
    odd = {"model__moe_shared_expert_intermediate_size": 5}
    with wrong_key("model.moe_shared_expert_intermediate_size: not-divisible (tensor_model_parallel_size)"):
        checked_policy(with_values(policy, **layout, **experts, **odd))


def test_the_sizes_of_a_checkpoint_are_those_of_its_weights(policy):
    values = {"megatron_cfg__tensor_model_parallel_size": 3, "init_checkpoint": "runs/step_4"}
    with wrong_key("megatron_cfg.tensor_model_parallel_size: not-divisible (init_checkpoint)"):
        checked_policy(with_values(policy, **values))


def test_tensor_parallel_layouts_that_fit(policy):
    values = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": True}
    config = PolicyConfig.model_validate(with_values(policy, **values))
    assert config.megatron_cfg.model_parallel_size == 2


@pytest.mark.parametrize(
    ("layers", "own", "sizes", "expected"),
    [
        (6, {}, (1, None), [6]),
        (6, {}, (3, None), [2, 2, 2]),
        (8, {}, (2, 2), [2, 2, 2, 2]),
        (5, {"first": 1}, (2, None), [1, 4]),
        (5, {"last": 2}, (2, None), [3, 2]),
        (7, {"first": 2, "last": 1}, (4, None), [2, 2, 2, 1]),
        (5, {"first": 3, "last": 2}, (2, None), [3, 2]),
    ],
)
def test_layers_of_the_chunks_of_a_pipeline(layers, own, sizes, expected):
    keys = {f"num_layers_in_{end}_pipeline_stage": count for end, count in own.items()}
    stages, chunks = sizes
    megatron = MegatronConfig(
        optimizer={"lr": 1e-2},
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        **keys,
    )
    assert megatron.layers_of_chunks(layers) == expected
    assert megatron.largest_stage(layers) == max(expected) * (chunks or 1)
