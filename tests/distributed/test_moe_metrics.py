"""`moe_metrics` are of real rows: neither a chunk without rows nor filled-up microbatches change them."""

import pytest
import tiny

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}
LAYOUTS = {
    "one": (1, {}),
    "recompute": (1, {"activation_checkpointing": True}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-recompute": (2, {"pipeline_model_parallel_size": 2, "activation_checkpointing": True}),
    "pp2-recompute-moe": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "activation_checkpointing": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
        },
    ),
}
ALL, EMPTY = (0, 8), (0, 0)


def balance_of_steps(megatron, kind, steps):
    """The metric, and every gradient, of steps that move no weight; each is (microbatch size, rows of the chunks)."""
    model = EXPERTS | {"moe_router_load_balancing_type": kind}
    megatron = megatron | {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}}
    worker = tiny.worker(tiny.policy_config(model=model, megatron=megatron, max_grad_norm=0.0))
    batch, found = tiny.grpo_batch(), []
    for mbs, chunks in steps:
        worker.begin_train_step(tiny.grpo_loss(), mbs=mbs, gbs=8)
        for first, end in chunks:
            rows = batch.slice(first, end)
            worker.train_microbatch(tiny.shard(rows) if rows.size else rows)
        (metric,) = worker.finish_train_step()["moe_metrics"].values()
        found.append((metric, {name: value.numpy() for name, value in tiny.gradients(worker).items()}))
    return found


# A step of microbatches that are filled up, and each of its microbatches as a step without filling.
FILLED = [(5, [ALL]), (5, [(0, 5)]), (3, [(5, 8)])]
FILLED_ON_TWO = [(3, [(0, 6), (6, 8)]), (3, [(0, 6)]), (1, [(6, 8)])]


@pytest.mark.quick_cases(
    "one-seq_aux_loss", "recompute-seq_aux_loss", "pp2-recompute-moe-seq_aux_loss", "ep2-aux_loss"
)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_filling_and_empty_chunks_do_not_count(ranks, layout, kind):
    world_size, megatron = LAYOUTS[layout]
    steps = [(4, [ALL]), (4, [ALL, EMPTY]), *(FILLED_ON_TWO if layout == "ep2" else FILLED)]
    for found in ranks(world_size).run(balance_of_steps, megatron, kind, steps):
        (whole, gradients), (with_empty, same_gradients), (filled, _), *alone = found
        assert with_empty == whole > 0.5
        assert all((same_gradients[name] == gradients[name]).all() for name in gradients)
        assert filled == pytest.approx(sum(metric for metric, _ in alone) / 2, rel=1e-6)
