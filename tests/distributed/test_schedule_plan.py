"""The schedule that overlaps expert communication computes what the plain schedule computes, bit for bit."""

import pytest
import tiny
import torch

MODEL = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 16}}


def steps_with_and_without_overlap(fused, entropy_coef, layout, layers, sections=None):
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

    plans = []
    plain_init = TransformerModelChunkSchedulePlan.__init__

    def counted(self, *args, **kwargs):
        plans.append(kwargs["output_processor_context"])
        plain_init(self, *args, **kwargs)

    results = []
    for overlap in (False, True):
        worker = tiny.worker(
            tiny.policy_config(
                precision="bfloat16",
                model=MODEL | {"num_layers": layers},
                megatron=layout
                | {
                    "expert_model_parallel_size": 2,
                    "overlap_moe_expert_parallel_comm": overlap,
                    "use_fused_linear_logprobs": fused,
                    "fused_linear_logprobs_chunk_size": 5,
                    "fused_linear_logprobs_packed": fused and sections is not None,
                },
                **(sections or {}),
            )
        )
        TransformerModelChunkSchedulePlan.__init__ = counted
        try:
            loss_fn = tiny.grpo_loss(fused=fused, entropy_coef=entropy_coef)
            worker.begin_train_step(loss_fn, mbs=1)
            batch = tiny.shard(tiny.grpo_batch())
            for start in (0, 2):
                worker.train_microbatch(batch.slice(start, start + 2))
            gradients = tiny.gradients(worker)
            result = worker.finish_train_step()
        finally:
            TransformerModelChunkSchedulePlan.__init__ = plain_init
        results.append((result["all_mb_metrics"], gradients, tiny.parameters(worker), len(plans)))
    (metrics, gradients, weights, none), (own_metrics, own_gradients, own_weights, some) = results
    assert (none, some > 0) == (0, True)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
    return (
        metrics == own_metrics,
        all(torch.equal(gradients[name], own_gradients[name]) for name in gradients),
        all(torch.equal(weights[name], own_weights[name]) for name in weights),
    )


INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
# Ranks, fused, the coefficient of the entropy, keys of Megatron, layers, sections.
CASES = {
    "unfused": (2, False, 0.0, {}, 2, None),
    "fused": (2, True, 0.0, {}, 2, None),
    "unfused-entropy": (2, False, 0.01, {}, 2, None),
    "fused-entropy": (2, True, 0.01, {}, 2, None),
    "interleaved": (4, True, 0.01, INTERLEAVED, 4, None),
    "unfused-packed": (2, False, 0.01, {}, 2, PACKED),
    "fused-packed": (2, True, 0.01, {}, 2, PACKED),
}


@pytest.mark.quick_cases("unfused", "fused", "unfused-entropy", "interleaved")
@pytest.mark.parametrize("case", CASES)
def test_overlap_changes_no_bit(ranks, case):
    world_size, *given = CASES[case]
    for rank in ranks(world_size).run(steps_with_and_without_overlap, *given):
        assert rank == (True, True, True)
