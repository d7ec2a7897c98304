"""Groups of ranks: policy.call_timeout_s finds a rank that hangs, and no rank that waits dies of it; nothing stays."""

import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny
import torch
import torch.distributed as dist
from listening import listening_addresses
from refusals import assert_holds
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.rank.agreement import agreed_on_first
from nemo_rl_mcore.rank.refit.sender import RefitSettings
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

LIMIT_S, SLOW_S = 3.0, 5.0
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}


def timeouts_of_the_layout(model, megatron):
    """Of each group that Megatron and the layout have made, by its description; in seconds."""
    from megatron.core import parallel_state

    from nemo_rl_mcore.rank.megatron import parallel_groups

    tiny.worker(tiny.policy_config(model=model, megatron=megatron, call_timeout_s=2.5))
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    return {
        f"{number} {group.group_desc}": group._get_backend(
            torch.device("cpu")
        ).options._timeout.total_seconds()
        for number, group in enumerate([*groups, parallel_groups.group("all")])
    }


@pytest.mark.parametrize(
    ("ranks_", "model", "megatron"),
    [
        (2, {}, TP2),
        (2, {"tie_word_embeddings": True}, PP2),
        (2, EXPERTS, EP2),
        pytest.param(4, {}, TP2 | PP2, marks=pytest.mark.exhaustive),
    ],
    ids=["tp2", "pp2-tied", "ep2", "tp2-pp2"],
)
def test_every_group_has_the_keys_timeout_fractions_included(ranks, ranks_, model, megatron):
    for timeouts in ranks(ranks_).run(timeouts_of_the_layout, model, megatron):
        described = " ".join(timeouts)
        assert all(
            kind in described for kind in ("DATA_PARALLEL", "TENSOR_MODEL", "PIPELINE_MODEL", "EXPERT_MODEL")
        )
        assert timeouts == dict.fromkeys(timeouts, 2.5)


def seconds_until_a_hanging_peer_is_given_up(megatron):
    """Rank 1 hangs in the loss: what `train` says on each rank, after how long."""

    class HangingLoss(ClippedPGLossFn):
        def sums(self, *args):
            if dist.get_rank() == 1:
                time.sleep(LIMIT_S + 3)
            return super().sums(*args)

    worker = tiny.worker(tiny.policy_config(megatron=megatron, call_timeout_s=LIMIT_S))
    loss_fn = tiny.grpo_loss()
    loss_fn.__class__ = HangingLoss
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        worker.train(tiny.shard(tiny.grpo_batch()), loss_fn, mbs=4 if not megatron else 8)
    return time.monotonic() - began, type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("megatron", [{}, TP2, PP2], ids=["dp2", "tp2", "pp2"])
@pytest.mark.quick_cases("dp2")
@pytest.mark.exhaustive_cases("pp2")
def test_a_rank_that_hangs_in_train_is_an_error_on_its_peer_within_the_keys_seconds(ranks, megatron):
    (seconds, kind, message), _ = ranks(2).run(seconds_until_a_hanging_peer_is_given_up, megatron)
    assert LIMIT_S - 1 < seconds < LIMIT_S + 3
    assert kind == "PeerLostError"
    assert_holds(message, "rank 0 ", " train", "policy.call_timeout_s")


@contextmanager
def slow_once(owner, name, rank):
    """Inside, the first call of this function takes SLOW_S more on a rank."""
    whole, calls = getattr(owner, name), []

    def slow(*args, **options):
        calls.append(name)
        if len(calls) == 1 and dist.get_rank() == rank:
            time.sleep(SLOW_S)
        return whole(*args, **options)

    with patch.object(owner, name, slow):
        yield
    assert calls, "the slow function is on the way"


class SlowEngine:
    """Takes its time for the first bucket, and counts the tensors that it was told of."""

    waits = tensors = 0

    def load_bucket(self, message):
        self.tensors += len(message["tensors"])
        return message

    def wait(self, _loading, _timeout_s):
        self.waits += 1
        if self.waits == 1:
            time.sleep(SLOW_S)


def patient_case(case, megatron, folder):
    """Something that takes longer on one rank than a collective may, then a train step; the seconds of both."""
    from nemo_rl_mcore.rank.megatron import train_backend
    from nemo_rl_mcore.rank.megatron.hf_weights import export, files

    folder = Path(folder)
    config = tiny.policy_config(megatron=megatron, call_timeout_s=LIMIT_S)
    began = time.monotonic()
    if case == "late start":
        time.sleep(SLOW_S * dist.get_rank() if dist.is_initialized() else 0)
    if case == "slow building":
        with slow_once(train_backend, "build_model", 1):
            worker = tiny.worker(config)
    else:
        worker = tiny.worker(config)
    if case == "refit":
        engine = SlowEngine()
        worker.connect_engines(engine, RefitSettings("shared_memory", 20_000, 60.0))
        sent = worker.send_weights()
        assert engine.tensors == (len(sent) if dist.get_rank() == 0 else 0)
        assert engine.waits > 2 or dist.get_rank()
    if case == "late caller":
        time.sleep(SLOW_S * dist.get_rank())
    if case == "save":
        with slow_once(FileSystemWriter, "write_data", 1):
            worker.save_checkpoint(str(folder / "saved"))
    if case == "load":
        worker.save_checkpoint(str(folder / "saved"))
        with slow_once(FileSystemReader, "read_data", 1):
            worker.load_checkpoint(str(folder / "saved"))
    if case == "export":
        with slow_once(files, "save_file", 0) if dist.get_rank() == 0 else patch.object(time, "sleep"):
            export.save_pretrained(worker.backend.chunks, config, folder / "exported", shard_bytes=20_000)
    assert worker.train(tiny.shard(tiny.grpo_batch()), tiny.grpo_loss())["update_successful"]
    return time.monotonic() - began


CASES = ["refit", "late start", "late caller", "slow building", "save", "load", "export"]


@pytest.mark.parametrize("megatron", [TP2, PP2, {}], ids=["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases("refit-tp2", "save-dp2")
@pytest.mark.exhaustive_cases(
    "late start-dp2", "late caller-dp2", "slow building-pp2", "load-tp2", "export-pp2"
)
def test_no_healthy_rank_dies_of_the_key(ranks, case, megatron, tmp_path):
    ranks(2).run(timeouts_of_the_layout, {}, megatron)  # the ranks have met
    assert max(ranks(2).run(patient_case, case, megatron, str(tmp_path))) > SLOW_S


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
