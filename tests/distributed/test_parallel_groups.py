"""Leaving a layout: nothing of it stays behind, however many follow in one process."""

import pytest

EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}


def threads_of_ten_workers(model, megatron):
    """How many threads this rank has while each is there, and when it has gone."""
    import os
    import time

    import tiny
    import torch.distributed as dist

    from nemo_rl_mcore.megatron import parallel_groups
    from nemo_rl_mcore.workers.policy_worker import MegatronPolicyWorker

    def threads(at_most):
        deadline = time.monotonic() + 10  # one that has ended may be listed for a moment
        while (count := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < deadline:
            time.sleep(0.05)
        return count

    at_work, left = [], [10_000]
    for _ in range(10):
        worker = MegatronPolicyWorker(tiny.policy_config(model=model, megatron=megatron))
        batch = tiny.shard(tiny.grpo_batch())
        worker.get_logprobs(data=batch)
        worker.train(batch, tiny.grpo_loss())
        at_work.append(threads(10_000))
        del worker
        parallel_groups.destroy()
        dist.barrier()
        left.append(threads(left[-1]))
    return at_work, left[1:]


@pytest.mark.quick_cases("one-rank")
@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        ({}, {}),
        ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ({}, {"pipeline_model_parallel_size": 2}),
        (EXPERTS, {"expert_model_parallel_size": 2}),
        (EXPERTS, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=["one-rank", "tp2-sp", "pp2", "experts-ep2", "experts-tp2"],
)
def test_ten_workers_leave_no_more_threads_than_one(ranks, model, megatron):
    for at_work, left in ranks(2 if megatron else 1).run(threads_of_ten_workers, model, megatron):
        assert max(left) == left[0]
        assert at_work[-1] > left[-1] + 20, "a layout has threads while it lasts"
