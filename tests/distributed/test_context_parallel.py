"""Ranks that share their sequences compute what one rank computes: log-probabilities, metrics, gradients, weights."""

from unittest.mock import patch

import numpy as np
import pytest
import tiny
from refusals import refused
from test_microbatching import (
    REFERENCE,
    WAYS,
    as_arrays,
    assert_equal,
    assert_metrics,
    config,
    losses,
    three_steps,
    uneven_batch,
)
from tolerances import LOGPROBS, REORDERED

from nemo_rl_mcore.rank import accelerator

CP2 = {"context_parallel_size": 2}
LAYOUTS = {
    "cp2": (2, CP2),
    "cp2-recompute": (2, CP2 | {"activation_checkpointing": True}),
    "cp2-dp2": (4, CP2),
    "cp2-pp2": (4, CP2 | {"pipeline_model_parallel_size": 2}),
    "cp2-tp2-sp": (4, CP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp4": (4, {"context_parallel_size": 4}),
}
# With 29 tokens a border is in the middle of what would be a slice of the packed row, and a row of one token, of which
# most ranks have none, is in it.
SHARED_WAYS = ("rows-8", "dynamic-17", "packing-29", "fused-rows-8", "fused-packing-29")


def way_of(name):
    """The same rows on ranks that share them."""
    way = WAYS[name]
    if not name.startswith("fused"):
        return way
    return way | {"megatron": way["megatron"] | {"fused_linear_logprobs_context_parallel": True}}


def own_weights(megatron):
    return as_arrays(tiny.parameters(tiny.worker(config(REFERENCE, megatron))))


@pytest.fixture(scope="module")
def one_rank(ranks):
    """The weights that one rank begins with, and what it computes."""
    weights = ranks(1).run(own_weights, {})[0]
    return weights, ranks(1).run(three_steps, REFERENCE, {}, None, weights)[0]


@pytest.mark.quick_cases("cp2-rows-8", "cp2-packing-29", "cp2-fused-packing-29", "cp2-tp2-sp-packing-29")
@pytest.mark.exhaustive_cases(
    *("cp2-recompute-rows-8", "cp2-dp2-dynamic-17", "cp2-pp2-packing-29", "cp4-packing-29"),
)
@pytest.mark.parametrize("way", SHARED_WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_sequences_equal_one(ranks, one_rank, layout, way):
    world_size, megatron = LAYOUTS[layout]
    weights, wanted = one_rank
    for found in ranks(world_size).run(three_steps, way_of(way), megatron, None, weights):
        if "tensor_model_parallel_size" in megatron or "pipeline_model_parallel_size" in megatron:
            assert_same_numbers(found, wanted)
        else:
            assert_equal(found, wanted)


def assert_same_numbers(found, wanted):
    """As `assert_equal`, where a rank holds parts of the weights: the norm of all gradients is among the metrics."""
    for name, values in wanted[0].items():
        assert found[0][name] == pytest.approx(values, abs=LOGPROBS), name
    for (metrics, _), (wanted_metrics, _) in zip(found[1], wanted[1], strict=True):
        assert_metrics(metrics, wanted_metrics)
    assert_metrics(found[3], wanted[3])


def against_data_parallel(way, experts, block=512):
    """The largest difference of a step's log-probabilities, metrics and gradients to ranks with whole sequences."""
    from nemo_rl_mcore.rank.megatron import layer_specs

    model = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.5} if experts else {}
    sections = REFERENCE if way == "rows-2" else WAYS[way]
    found = []
    for megatron in (CP2, {}):
        worker = tiny.worker(config(sections, megatron, model))
        with patch.object(layer_specs, "_BLOCK", block):
            said = worker.get_logprobs(data=uneven_batch())["logprobs"].numpy()
            step = worker.train(tiny.shard(uneven_batch()), losses()[0])
        names = ("loss", "global_valid_toks", "global_valid_seqs")
        metrics = [*(step["all_mb_metrics"][name] for name in names), step["grad_norm"].tolist()]
        gradients = as_arrays(tiny.gradients(worker))
        found.append([said, np.array(metrics), *(gradients[name] for name in sorted(gradients))])
    return max(float(abs(own - wanted).max()) for own, wanted in zip(*found, strict=True))


def test_a_step_is_that_of_ranks_with_whole_sequences(ranks):
    for case in (
        *(("rows-8", False), ("packing-29", False), ("rows-2", True)),
        *(("rows-8", False, 2), ("packing-29", False, 2)),
    ):
        assert max(ranks(2).run(against_data_parallel, *case)) < REORDERED


def refused_on_gpus():
    """Layers of ranks that are told that they have a GPU, on a machine without Transformer Engine."""
    from nemo_rl_mcore.rank.megatron.layer_specs import decoder_spec

    alone = tiny.worker(tiny.policy_config())
    transformer, shared = alone.backend.config, tiny.policy_config(megatron=CP2).megatron_cfg
    with patch.object(accelerator, "has_cuda", lambda: True):
        decoder_spec(alone.policy.megatron_cfg, transformer, None)
        with refused("missing-package", "policy.megatron_cfg.context_parallel_size: 2"):
            decoder_spec(shared, transformer, None)
    return decoder_spec(shared, transformer, None) is not None


def test_local_layers_on_gpus_are_refused_when_a_worker_starts(ranks):
    assert ranks(1).run(refused_on_gpus) == [True]
