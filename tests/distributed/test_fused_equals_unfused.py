"""Fused and unfused training is one function computed two ways, on every layout."""

import pytest
import tiny
from tolerances import FIVE_STEPS, METRICS

CACHE = "fused_linear_logprobs_cache_bytes"
LAYOUTS = {
    "tp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    # Room for the logits of every row of a microbatch.
    "tp1-cache": (1, {CACHE: 32 * 24 * 4}),
}


def train_five_steps(megatron, tied, fused):
    config = tiny.policy_config(
        model={"tie_word_embeddings": tied},
        # A byte budget that makes several chunks even of this small problem.
        megatron=megatron | {"use_fused_linear_logprobs": fused, "fused_linear_logprobs_chunk_size": 5},
    )
    worker = tiny.worker(config)
    start = tiny.parameters(worker)
    loss_fn, losses = tiny.grpo_loss(fused=fused), []
    for step in range(5):
        result = worker.train(tiny.shard(tiny.grpo_batch(seed=step)), loss_fn)
        assert result["update_successful"]
        losses.append(result["all_mb_metrics"])
    return start, losses, tiny.parameters(worker)


def fused_and_unfused(megatron, tied):
    plain = {key: value for key, value in megatron.items() if key != CACHE}
    start, losses, end = train_five_steps(plain, tied, fused=False)
    fused_start, fused_losses, fused_end = train_five_steps(megatron, tied, fused=True)
    return {
        "start": tiny.largest_difference(start, fused_start),
        "moved": tiny.largest_difference(start, end),
        "end": tiny.largest_difference(end, fused_end),
        "metrics": [
            (name, unfused[name][0], fused[name][0])
            for unfused, fused in zip(losses, fused_losses, strict=True)
            for name in unfused
        ],
    }


@pytest.mark.smoke("tp1-untied", "tp2-sp-untied")
@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_losses_and_parameters_after_five_steps(ranks, layout, tied):
    world_size, megatron = LAYOUTS[layout]
    for rank in ranks(world_size).run(fused_and_unfused, megatron, tied):
        assert rank["start"] == 0.0
        assert rank["moved"] > 1e-2
        assert rank["end"] < FIVE_STEPS
        for name, unfused, fused in rank["metrics"]:
            assert fused == pytest.approx(unfused, **METRICS), name
