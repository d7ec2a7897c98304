"""The schedule that overlaps expert communication computes what the plain schedule computes, bit for bit."""

import pytest

MODEL = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 16}}


def steps_with_and_without_overlap(fused, entropy_coef, layout, layers, sections=None):
    import tiny
    import torch
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


def test_overlap_changes_no_bit_of_an_interleaved_pipeline(ranks):
    for rank in ranks(4).run(steps_with_and_without_overlap, True, 0.01, INTERLEAVED, 4):
        assert rank == (True, True, True)


@pytest.mark.each_value
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01], ids=["logprobs", "logprobs-and-entropy"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_overlap_changes_no_bit(ranks, fused, entropy_coef):
    for rank in ranks(2).run(steps_with_and_without_overlap, fused, entropy_coef, {}, 2):
        assert rank == (True, True, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_overlap_changes_no_bit_of_packed_rows(ranks, fused):
    for rank in ranks(2).run(steps_with_and_without_overlap, fused, 0.01, {}, 2, PACKED):
        assert rank == (True, True, True)
