import copy

import pytest

from nemo_rl_mcore.config import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    checked,
)


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
    assert model.parameters == expected


def test_parameter_count_of_experts_and_prediction_layers():
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 24}
    model = ModelConfig.model_validate({**sizes, **experts, "mtp_num_layers": 1})
    # Attention, eight experts with the router, the shared expert, two norms; three of these layers.
    layer = 4 * 64**2 + 8 * (3 * 64 * 16 + 64) + 3 * 64 * 24 + 2 * 64
    assert model.parameters == 3 * layer + (2 * 64 * 64 + 3 * 64) + 2 * 32 * 64 + 64


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 66}, "hidden_size: 66 is not divisible by num_attention_heads: 4"),
        ({"num_query_groups": 3}, "num_attention_heads: 4 is not divisible by num_query_groups: 3"),
        ({"hidden_size": 60}, "the head size 15 is odd"),
        ({"kv_channels": 15}, "kv_channels: the head size 15 is odd"),
        ({"moe_router_topk": 4}, "moe_router_topk: 4 does nothing with num_moe_experts: null"),
        ({"mtp_loss_scaling_factor": 0.3}, "0.3 does nothing with mtp_num_layers: null"),
        (
            {"num_moe_experts": 4, "moe_router_bias_update_rate": 0.1},
            "0.1 does nothing with moe_router_enable_expert_bias: false",
        ),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "moe_router_topk: 3 is above num_moe_experts: 2"),
        (
            {"num_moe_experts": 4, "moe_router_topk": 1},
            "set moe_router_pre_softmax: true, or moe_router_score",
        ),
        (
            {"num_moe_experts": 4, "moe_router_enable_expert_bias": True},
            "moe_router_enable_expert_bias: true needs moe_router_score_function: sigmoid, and it is softmax",
        ),
        (
            {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01, "mtp_num_layers": 1},
            "moe_aux_loss_coeff: 0.01 does not go with mtp_num_layers: 1",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_aux_loss_coeff": 0.01,
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
            },
            "moe_aux_loss_coeff: 0.01 does not go with moe_router_enable_expert_bias: true",
        ),
        ({"mtp_num_layers": 0}, "greater than or equal to 1"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "'none', 'aux_loss' or"),
    ],
)
def test_model_refusals(sizes, message):
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32, **sizes}
    with pytest.raises(ValueError, match=message):
        checked(ModelConfig, given)


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
    with pytest.raises(ValueError, match=r"0\.01 contradicts optimizer\.weight_decay: 0\.1"):
        checked(
            MegatronConfig,
            MegatronConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1), scheduler=SchedulerConfig()),
        )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"optimizer": {"lr": 1e-3, "min_lr": 1e-2}}, r"min_lr: 0\.01 is above lr: 0\.001"),
        ({"scheduler": {"lr_decay_style": "cosine"}}, "lr_decay_iters: is null with lr_decay_style: cosine"),
        (
            {"scheduler": {"lr_decay_iters": 5, "lr_warmup_iters": 5}},
            "lr_warmup_iters: 5 is not below lr_decay_iters: 5",
        ),
        ({"scheduler": {"end_weight_decay": 0.5}}, "end_weight_decay: 0.5 differs from start_weight_decay"),
        (
            {"scheduler": {"lr_warmup_init": 1e-2}},
            r"scheduler\.lr_warmup_init: 0\.01 is above optimizer\.lr: 0\.001",
        ),
        ({"enabled": False}, "enabled: Megatron is the only backend"),
        (
            {
                "distributed_data_parallel_config": {
                    "overlap_param_gather": True,
                    "overlap_grad_reduce": True,
                },
                "optimizer": {"lr": 1e-3, "use_distributed_optimizer": False},
            },
            "overlap_param_gather: true needs policy.megatron_cfg.optimizer.use_distributed_optimizer: true",
        ),
        (
            {"distributed_data_parallel_config": {"overlap_param_gather": True}},
            "overlap_param_gather: true needs distributed_data_parallel_config.overlap_grad_reduce: true",
        ),
    ],
)
def test_megatron_refusals(section, message):
    with pytest.raises(ValueError, match=message):
        checked(MegatronConfig, {"optimizer": {"lr": 1e-3}, **section})


def test_a_warm_up_may_start_at_the_peak():
    given = {"optimizer": {"lr": 1e-3}, "scheduler": {"lr_warmup_init": 1e-3}}
    assert MegatronConfig.model_validate(given).scheduler.lr_warmup_init == 1e-3


FUSED = "megatron_cfg.use_fused_linear_logprobs: true does not go with policy."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("megatron_cfg__context_parallel_size", 2, "megatron_cfg.context_parallel_size: 2"),
        ("sequence_packing__enabled", True, "sequence_packing.enabled: true"),
        ("generation__top_k", 5, "generation.top_k: 5"),
        ("generation__top_p", 0.9, "generation.top_p: 0.9"),
        (
            "megatron_cfg__distributed_data_parallel_config__overlap_param_gather",
            True,
            "megatron_cfg.distributed_data_parallel_config.overlap_param_gather: true",
        ),
    ],
)
def test_fused_guardrails_name_both_keys_and_what_to_set(load, refusals, key, value, message):
    override = f"policy.{key.replace('__', '.')}={str(value).lower()}"
    refusal = next(text for text in refusals(override) if FUSED in text)
    assert message in refusal
    assert "set policy." in refusal
    assert "or policy.megatron_cfg.use_fused_linear_logprobs: false" in refusal


def test_fused_guardrails_hold_without_the_loader(policy):
    with pytest.raises(ValueError, match="use_fused_linear_logprobs: true does not go with"):
        checked(PolicyConfig, with_values(policy, generation__top_k=5))


def test_fused_goes_with_temperature_and_unfused_with_filtering(load):
    assert load("policy.generation.temperature=0.7").policy.generation.temperature == 0.7
    unfused = "policy.megatron_cfg.use_fused_linear_logprobs=false"
    assert load(unfused, "policy.generation.top_k=5").policy.generation.top_k == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"megatron_cfg__sequence_parallel": True},
            "sequence_parallel: true needs tensor_model_parallel_size above 1",
        ),
        (
            {"megatron_cfg__tensor_model_parallel_size": 3},
            "num_attention_heads: 4 is not divisible by policy.megatron_cfg.tensor_model_parallel_size: 3",
        ),
        (
            {"megatron_cfg__tensor_model_parallel_size": 4, "model__num_query_groups": 2},
            r"model.num_query_groups: 2 is not divisible by .*set it to 4",
        ),
        (
            {"megatron_cfg__pipeline_model_parallel_size": 4},
            "model.num_layers: 2 is not divisible by policy.megatron_cfg.pipeline_model_parallel_size: 4",
        ),
        (
            {
                "megatron_cfg__pipeline_model_parallel_size": 2,
                "megatron_cfg__virtual_pipeline_model_parallel_size": 2,
            },
            "model.num_layers: 2 is not divisible by .* times .*virtual_pipeline_model_parallel_size: 2",
        ),
        (
            {"megatron_cfg__virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size: 2 needs pipeline_model_parallel_size above 1",
        ),
        ({"megatron_cfg__expert_model_parallel_size": 2}, "2 needs a model with experts"),
        (
            {
                "megatron_cfg__fused_linear_logprobs_cache_bytes": 8,
                "megatron_cfg__use_fused_linear_logprobs": False,
            },
            "8 does nothing with use_fused_linear_logprobs: false",
        ),
        (
            {"megatron_cfg__fused_linear_logprobs_packed": True},
            "fused_linear_logprobs_packed: true does nothing with policy.sequence_packing.enabled: false; remove it",
        ),
        (
            {
                "megatron_cfg__fused_linear_logprobs_packed": True,
                "megatron_cfg__use_fused_linear_logprobs": False,
                "sequence_packing__enabled": True,
            },
            "packed: true does nothing with policy.megatron_cfg.use_fused_linear_logprobs: false; remove it",
        ),
        ({"megatron_cfg__context_parallel_size": 2}, "context parallelism is not supported yet"),
        (
            {"model_name": "Qwen/Qwen3-0.6B"},
            "model.hidden_size: 64 contradicts the 1024 of policy.model_name: 'Qwen/Qwen3-0.6B'",
        ),
        ({"model__vocab_size": 31}, "31 is below the 32 tokens of tokenizer.name: char"),
        ({"max_total_sequence_length": 64}, "64 is above policy.model.max_position_embeddings: 32"),
        ({"megatron_cfg__pipeline_dtype": "bfloat16"}, "bfloat16 contradicts policy.precision: float32"),
        ({"megatron_cfg__optimizer__bf16": True}, "bf16: true contradicts policy.precision: float32"),
        ({"megatron_cfg__optimizer__clip_grad": 0.5}, "0.5 contradicts policy.max_grad_norm: 1.0"),
        ({"precision": "float16"}, "fp16 gradients overflow .* set precision: bfloat16"),
        ({"generation__stop_strings": ["a", ""]}, "an empty text would end every response"),
        ({"generation__temperature": 0}, "greater than or equal to 0.01"),
        (
            {"generation__stop_token_ids": [32, 31, -1, 0]},
            r"generation.stop_token_ids: \[32, -1\] is outside 0 to 31, the ids of policy.model.vocab_size: 32",
        ),
    ],
)
def test_policy_refusals(policy, values, message):
    with pytest.raises(ValueError, match=message):
        checked(PolicyConfig, with_values(policy, **values))


def test_stop_tokens_may_be_any_id_of_the_model(policy):
    values = {"generation__stop_token_ids": [0, 31]}
    assert PolicyConfig.model_validate(with_values(policy, **values)).generation.stop_token_ids == (0, 31)


def test_stop_tokens_are_not_judged_by_a_wrong_vocabulary(refusals):
    texts = refusals("policy.generation.stop_token_ids=[99]", "policy.model.vocab_size=many")
    assert [text.partition(":")[0] for text in texts] == ["policy.model.vocab_size"]


@pytest.mark.parametrize(
    ("experts", "layout", "expected"),
    [
        (4, {"tensor_model_parallel_size": 2}, "sequence_parallel: false does not go with experts"),
        (3, {"expert_model_parallel_size": 2}, "num_moe_experts: 3 is not divisible by"),
        (4, {"expert_tensor_parallel_size": 2}, "set expert_tensor_parallel_size: 1"),
    ],
)
def test_rules_of_experts(refusals, experts, layout, expected):
    overrides = [f"policy.megatron_cfg.{key}={value}" for key, value in layout.items()]
    texts = refusals(f"policy.model.num_moe_experts={experts}", *overrides)
    assert any(expected in text for text in texts)


OVERLAP = "policy.megatron_cfg.overlap_moe_expert_parallel_comm"
OVERLAPPED = (
    f"{OVERLAP}=true",
    "policy.model.num_moe_experts=4",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "policy.precision=bfloat16",
)


def test_overlapped_expert_communication(load):
    assert load(*OVERLAPPED).policy.megatron_cfg.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy.model.num_moe_experts=null", "model.num_moe_experts: null"),
        ("policy.megatron_cfg.expert_model_parallel_size=1", "expert_model_parallel_size: 1"),
        ("policy.megatron_cfg.activation_checkpointing=true", "activation_checkpointing: true"),
        ("policy.megatron_cfg.pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size: null"),
        ("policy.model.moe_aux_loss_coeff=0.1", "moe_aux_loss_coeff: 0.1"),
        ("policy.model.mtp_num_layers=1", "mtp_num_layers: 1"),
        ("policy.precision=float32", "true needs policy.precision: bfloat16, and it is float32"),
    ],
)
def test_rules_of_overlapped_expert_communication(refusals, override, expected):
    texts = refusals(*OVERLAPPED, override)
    assert any(text.startswith(OVERLAP) and expected in text for text in texts), texts


def test_experts_are_whole_on_their_rank_but_the_shared_expert_is_split(policy):
    layout = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": True}
    experts = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 5, "model__ffn_hidden_size": 5}
    assert PolicyConfig.model_validate(with_values(policy, **layout, **experts))
    odd = {"model__moe_shared_expert_intermediate_size": 5}
    with pytest.raises(ValueError, match="moe_shared_expert_intermediate_size: 5 is not divisible by"):
        checked(PolicyConfig, with_values(policy, **layout, **experts, **odd))


def test_the_sizes_of_a_checkpoint_are_those_of_its_weights(policy):
    values = {"megatron_cfg__tensor_model_parallel_size": 3, "init_checkpoint": "runs/step_4"}
    with pytest.raises(
        ValueError, match=r"size: 3 does not divide the .* \(policy.init_checkpoint\); set it to 2"
    ):
        checked(PolicyConfig, with_values(policy, **values))


def test_tensor_parallel_layouts_that_fit(policy):
    values = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": True}
    config = PolicyConfig.model_validate(with_values(policy, **values))
    assert config.megatron_cfg.model_parallel_size == 2
