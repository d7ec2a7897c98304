"""Logits that the forward pass leaves to the backward pass in train steps: of one microbatch at a time."""

import gc
from contextlib import nullcontext

import pytest
import tiny

from nemo_rl_mcore.config import ClippedPGLossConfig
from nemo_rl_mcore.losses import ClippedPGLossFn, DistillationLossFn
from nemo_rl_mcore.ops._head import LogitsCache

CACHE = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_cache_bytes": 1 << 20}
FOUR_LAYERS = {"model": {"num_layers": 4}}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
OVERLAP = {"expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}
# Name: number of ranks, and sections of the policy.
LAYOUTS = {
    "one rank": (1, {}, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp2": (2, PIPELINE, {}),
    "pp2-vpp2": (2, INTERLEAVED, FOUR_LAYERS),
    "ep2-overlap": (2, OVERLAP, {"model": EXPERTS, "precision": "bfloat16"}),
    "pp2-vpp2-overlap": (
        4,
        INTERLEAVED | OVERLAP,
        {"model": EXPERTS | {"num_layers": 4}, "precision": "bfloat16"},
    ),
}


def held():
    gc.collect()
    return sum(type(x) is LogitsCache and bool(x._panels) for x in gc.get_objects())


def watching(loss_class, most, fails=False):
    class Watching(loss_class):
        def sums(self, outputs, data):
            most.append(held())
            if fails and len(most) > 2:
                raise ValueError("a loss that fails")
            return super().sums(outputs, data)

    return Watching


def watched_step(megatron, sections, fails):
    """Caches that hold logits when a microbatch has its loss, at most; and after the step, or its abort."""
    most = [0]
    loss_fn = watching(ClippedPGLossFn, most, fails)(ClippedPGLossConfig(), use_fused_linear_logprobs=True)
    worker = tiny.worker(tiny.policy_config(megatron=CACHE | megatron, train_micro_batch_size=1, **sections))
    worker.begin_train_step(loss_fn, mbs=1)
    with pytest.raises(ValueError, match="a loss that fails") if fails else nullcontext():
        worker.train_microbatch(tiny.shard(tiny.grpo_batch()))
    worker.abort_train_step()
    after = held()
    worker.get_logprobs(data=tiny.shard(tiny.grpo_batch()))
    return max(most), after, held()


@pytest.mark.quick_cases("one rank")
@pytest.mark.exhaustive_cases("pp2-vpp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_one_microbatch_are_kept_at_a_time(ranks, layout):
    world_size, megatron, sections = LAYOUTS[layout]
    seen = ranks(world_size).run(watched_step, megatron, sections, False)
    assert max(most for most, *_ in seen) == 1
    assert all(after == [0, 0] for _, *after in seen)


def test_a_step_that_fails_and_is_aborted_keeps_none(ranks):
    [(most, *after)] = ranks(1).run(watched_step, {}, {}, True)
    assert (most, after) == (1, [0, 0])


def distilled(fused):
    """Caches that hold logits when a student has its loss, which reads logits at given ids and of its own tokens."""
    megatron = CACHE if fused else {"use_fused_linear_logprobs": False}
    worker, batch, most = tiny.worker(tiny.policy_config(megatron=megatron)), tiny.grpo_batch(), []
    for name, value in worker.get_topk_logits(data=tiny.grpo_batch(), k=5).items():
        batch[name if name.startswith("teacher") else f"teacher_{name}"] = value
    worker.train(batch, watching(DistillationLossFn, most)({"rl_weight": 0.5, "rl": {}}))
    return max(most)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fused", [False, True])
def test_a_student_has_one_cache_for_both_of_its_parts_and_none_where_unfused(ranks, fused):
    assert ranks(1).run(distilled, fused) == [int(fused)]
