"""Leaving a layout: nothing of it stays behind, however many follow in one process."""

import os
import tempfile
import time

import pytest
import tiny
import torch.distributed as dist
from listening import listening_addresses

from nemo_rl_mcore.rank.agreement import agreed_on_first
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}


def threads_of_ten_workers(model, megatron):
    """How many threads this rank has while each is there, and when it has gone."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

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


@pytest.mark.exhaustive_cases("pp2", "experts-tp2")
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


def listening_of_a_working_rank():
    """After all that opens connections: passes, training, a refit, a checkpoint."""
    worker = tiny.worker(tiny.policy_config(megatron={"pipeline_model_parallel_size": 2}))
    worker.get_logprobs(data=tiny.grpo_batch())
    worker.train(tiny.grpo_batch(), tiny.grpo_loss())
    worker.prepare_refit_info()
    folder = [agreed_on_first(tempfile.mkdtemp)]
    dist.broadcast_object_list(folder)
    worker.save_checkpoint(f"{folder[0]}/saved")
    worker.load_checkpoint(f"{folder[0]}/saved")
    return listening_addresses()


def test_ranks_of_one_machine_listen_on_loopback_alone(ranks):
    for addresses in ranks(2).run(listening_of_a_working_rank):
        assert len(addresses) > 5, "the store, and a socket of each group"
        assert set(addresses) == {"127.0.0.1"}
