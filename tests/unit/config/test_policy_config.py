import copy

import pytest
from refusals import refusals_of, wrong_key

from nemo_rl_mcore.config import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    checked,
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
    assert (model.head_dim, model.query_groups, model.ffn_size) == (16, 4, 256)


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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 66}, "hidden_size: not-divisible (num_attention_heads)"),
        ({"num_query_groups": 3}, "num_attention_heads: not-divisible (num_query_groups)"),
        ({"hidden_size": 60}, "num_attention_heads: not-divisible (hidden_size)"),
        ({"kv_channels": 15}, "kv_channels: not-divisible (hidden_size)"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "moe_router_topk: too-large (num_moe_experts)"),
        (
            {"num_moe_experts": 4, "moe_router_topk": 1},
            "moe_router_topk: no-signal (moe_router_pre_softmax)",
        ),
        (
            {"num_moe_experts": 4, "moe_router_enable_expert_bias": True},
            "moe_router_enable_expert_bias: requires (moe_router_score_function)",
        ),
        (
            {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01, "mtp_num_layers": 1},
            "moe_aux_loss_coeff: incompatible (mtp_num_layers)",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_aux_loss_coeff": 0.01,
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
            },
            "moe_aux_loss_coeff: incompatible (moe_router_enable_expert_bias)",
        ),
        (
            {"num_moe_experts": 8, "moe_router_num_groups": 4},
            "moe_router_num_groups: requires (moe_router_group_topk)",
        ),
        (
            {"num_moe_experts": 8, "moe_router_group_topk": 4},
            "moe_router_group_topk: requires (moe_router_num_groups)",
        ),
        (
            {"num_moe_experts": 8, "moe_router_num_groups": 3, "moe_router_group_topk": 2},
            "num_moe_experts: not-divisible (moe_router_num_groups)",
        ),
        (
            {"num_moe_experts": 8, "moe_router_num_groups": 2, "moe_router_group_topk": 4},
            "moe_router_group_topk: too-large (moe_router_num_groups)",
        ),
        *(
            (
                {
                    "num_moe_experts": 8,
                    "moe_router_num_groups": 4,
                    "moe_router_group_topk": 2,
                    "moe_router_topk": topk,
                    "moe_router_score_function": "sigmoid",
                },
                "moe_router_topk: not-allowed (moe_router_group_topk)",
            )
            for topk in (1, 5)
        ),
        ({"mtp_num_layers": 0}, "mtp_num_layers: not-allowed"),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type: not-allowed",
        ),
    ],
)
def test_model_refusals(sizes, message):
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32, **sizes}
    assert refusals_of(lambda: checked(ModelConfig, given)) == [message]


def test_logprob_batch_size_follows_the_training_micro_batch(policy):
    del policy["logprob_batch_size"]
    assert PolicyConfig.model_validate(policy).logprob_batch_size == policy["train_micro_batch_size"]
    assert PolicyConfig.model_validate({**policy, "logprob_batch_size": 4}).logprob_batch_size == 4


def test_schedule_holds_the_optimizers_weight_decay():
    for optimizer in ({"lr": 1e-3, "weight_decay": 0.1}, OptimizerConfig(lr=1e-3, weight_decay=0.1)):
        config = MegatronConfig.model_validate({"optimizer": optimizer})
        assert (config.scheduler.start_weight_decay, config.scheduler.end_weight_decay) == (0.1, 0.1)
    assert MegatronConfig.model_validate({"optimizer": {"lr": 1e-3}}).scheduler.start_weight_decay == 0.01


def test_a_built_schedule_with_another_weight_decay_is_refused():
    with wrong_key("scheduler.start_weight_decay: contradicts (weight_decay)"):
        checked(
            MegatronConfig,
            MegatronConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1), scheduler=SchedulerConfig()),
        )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"optimizer": {"lr": 1e-3, "min_lr": 1e-2}}, "optimizer.min_lr: too-large (lr)"),
        (
            {"scheduler": {"lr_decay_style": "cosine"}},
            "scheduler.lr_decay_iters: missing (lr_decay_style)",
        ),
        (
            {"scheduler": {"lr_decay_iters": 5, "lr_warmup_iters": 5}},
            "scheduler.lr_warmup_iters: too-large (lr_decay_iters)",
        ),
        (
            {"scheduler": {"end_weight_decay": 0.5}},
            "scheduler.end_weight_decay: contradicts (start_weight_decay)",
        ),
        (
            {"scheduler": {"lr_warmup_init": 1e-2}},
            "scheduler.lr_warmup_init: too-large (lr)",
        ),
        ({"enabled": False}, "enabled: not-supported"),
        (
            {
                "distributed_data_parallel_config": {
                    "overlap_param_gather": True,
                    "overlap_grad_reduce": True,
                },
                "optimizer": {"lr": 1e-3, "use_distributed_optimizer": False},
            },
            "distributed_data_parallel_config.overlap_param_gather: requires (use_distributed_optimizer)",
        ),
        (
            {"distributed_data_parallel_config": {"overlap_param_gather": True}},
            "distributed_data_parallel_config.overlap_param_gather: requires (overlap_grad_reduce)",
        ),
    ],
)
def test_megatron_refusals(section, message):
    assert refusals_of(lambda: checked(MegatronConfig, {"optimizer": {"lr": 1e-3}, **section})) == [message]


def test_a_warm_up_may_start_at_the_peak():
    given = {"optimizer": {"lr": 1e-3}, "scheduler": {"lr_warmup_init": 1e-3}}
    assert MegatronConfig.model_validate(given).scheduler.lr_warmup_init == 1e-3


FUSED = "policy.megatron_cfg.use_fused_linear_logprobs"


def test_fused_guardrails_hold_without_the_loader(policy):
    with wrong_key("megatron_cfg.use_fused_linear_logprobs: incompatible (top_k)"):
        checked_policy(with_values(policy, generation__top_k=5))


def test_fused_goes_with_temperature_and_unfused_with_filtering(load):
    assert load("policy.generation.temperature=0.7").policy.generation.temperature == 0.7
    unfused = "policy.megatron_cfg.use_fused_linear_logprobs=false"
    assert load(unfused, "policy.generation.top_k=5").policy.generation.top_k == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"megatron_cfg__sequence_parallel": True},
            "megatron_cfg.sequence_parallel: requires (tensor_model_parallel_size)",
        ),
        (
            {"megatron_cfg__tensor_model_parallel_size": 3},
            "model.num_attention_heads: not-divisible (tensor_model_parallel_size)",
        ),
        (
            {"megatron_cfg__tensor_model_parallel_size": 4, "model__num_query_groups": 2},
            "model.num_query_groups: not-divisible (tensor_model_parallel_size)",
        ),
        (
            {"megatron_cfg__pipeline_model_parallel_size": 4},
            "model.num_layers: not-divisible (pipeline_model_parallel_size)",
        ),
        (
            {
                "megatron_cfg__pipeline_model_parallel_size": 2,
                "megatron_cfg__virtual_pipeline_model_parallel_size": 2,
            },
            "model.num_layers: not-divisible (pipeline_model_parallel_size)",
        ),
        (
            {"megatron_cfg__virtual_pipeline_model_parallel_size": 2},
            "megatron_cfg.virtual_pipeline_model_parallel_size: requires (pipeline_model_parallel_size)",
        ),
        (
            {"megatron_cfg__expert_model_parallel_size": 2},
            "megatron_cfg.expert_model_parallel_size: requires (num_moe_experts)",
        ),
        (
            {"megatron_cfg__context_parallel_size": 2, "model__mtp_num_layers": 1},
            "megatron_cfg.context_parallel_size: incompatible (mtp_num_layers)",
        ),
        (
            {
                "megatron_cfg__context_parallel_size": 2,
                "megatron_cfg__cp_comm_type": "a2a",
                "model__num_query_groups": 1,
            },
            "megatron_cfg.cp_comm_type: not-divisible (context_parallel_size)",
        ),
        (
            {"model_name": "Qwen/Qwen3-0.6B"},
            "model.hidden_size: contradicts (model_name)",
        ),
        ({"model__vocab_size": 31}, "model.vocab_size: too-small (name)"),
        (
            {"max_total_sequence_length": 64},
            "max_total_sequence_length: too-large (max_position_embeddings)",
        ),
        (
            {"megatron_cfg__pipeline_dtype": "bfloat16"},
            "megatron_cfg.pipeline_dtype: contradicts (precision)",
        ),
        ({"megatron_cfg__optimizer__bf16": True}, "megatron_cfg.optimizer.bf16: contradicts (precision)"),
        (
            {"megatron_cfg__optimizer__clip_grad": 0.5},
            "megatron_cfg.optimizer.clip_grad: contradicts (max_grad_norm)",
        ),
        ({"precision": "float16"}, "precision: not-allowed"),
        ({"generation__stop_strings": ["a", ""]}, "generation.stop_strings: not-allowed"),
        ({"generation__temperature": 0}, "generation.temperature: not-allowed"),
        (
            {"generation__stop_token_ids": [32, 31, -1, 0]},
            "generation.stop_token_ids: too-large (vocab_size)",
        ),
    ],
)
def test_policy_refusals(policy, values, message):
    assert message in refusals_of(lambda: checked_policy(with_values(policy, **values)))


def test_stop_tokens_may_be_any_id_of_the_model(policy):
    values = {"generation__stop_token_ids": [0, 31]}
    assert PolicyConfig.model_validate(with_values(policy, **values)).generation.stop_token_ids == (0, 31)


OVERLAP = "policy.megatron_cfg.overlap_moe_expert_parallel_comm"
OVERLAPPED = (
    f"{OVERLAP}=true",
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
    ("overrides", "related"),
    [
        (["policy.model.mtp_num_layers=1"], "mtp_num_layers"),
        (OVERLAPPED, "overlap_moe_expert_parallel_comm"),
    ],
    ids=["mtp", "overlap"],
)
def test_what_a_hybrid_model_lacks_is_refused(load, refusals, overrides, related):
    key = "policy.megatron_cfg.model_class"
    load(*overrides)
    assert refusals(*overrides, f"{key}=hybrid") == [f"{key}: incompatible ({related})"]


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
