"""An error of one rank is the same error on all of them, soon, on every layout; abort leaves no trace of the step."""

from contextlib import contextmanager

import pytest
import tiny
import torch
import torch.distributed as dist
import worker_state

from nemo_rl_mcore.losses import ClippedPGLossFn

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
# Name: number of ranks, then the sections of the policy. The last rank is a last stage on all of them.
LAYOUTS = {
    "dp2": (2, {}),
    "dp2-overlap": (2, {"megatron": OVERLAP}),
    "tp2": (2, {"megatron": TP2}),
    "tp2-sp": (2, {"megatron": TP2 | {"sequence_parallel": True}}),
    "pp2": (2, {"megatron": PP2, "model": {"tie_word_embeddings": True}}),
    "pp2-vpp2": (2, {"megatron": VPP2, "model": {"num_layers": 4}}),
    "ep2": (2, {"megatron": {"expert_model_parallel_size": 2}, "model": EXPERTS}),
    "dp2-pp2": (4, {"megatron": PP2}),
    "dp2-pp2-overlap": (4, {"megatron": PP2 | OVERLAP}),
    "tp2-pp2": (4, {"megatron": TP2 | PP2}),
}


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def failing_loss(at_call, message="the advantages are wrong"):
    """A loss that raises on the last rank alone at its n-th microbatch; other ranks' losses, and n = 0, are sound."""

    class FailingLoss(ClippedPGLossFn):
        calls = 0

        def sums(self, *args):
            self.calls += 1
            if is_last_rank() and self.calls == at_call:
                raise ArithmeticError(message)
            return super().sums(*args)

    sound = tiny.grpo_loss()
    sound.__class__ = FailingLoss
    return sound


def step(worker, loss_fn, *, split, batch):
    if not split:
        return worker.train(batch, loss_fn, gbs=16)
    worker.begin_train_step(loss_fn, gbs=16)
    worker.train_microbatch(batch.slice(0, 4))
    worker.train_microbatch(batch.slice(4, batch.size))
    return worker.finish_train_step()


def told_by(call):
    """The class and the message of what a call raises; None if it raises nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return None


def traces_of_a_failing_loss(sections):
    """Of `train` and of a split step: what is told, what differs after abort, and after a clean step from there."""
    worker = worker_state.prepared(sections)
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=7))
    start = worker_state.capture(worker)
    step(worker, tiny.grpo_loss(), split=True, batch=batch)
    wanted = worker_state.capture(worker)
    worker_state.restore(worker, start)
    found = []
    for split, at_call in ((False, 2), (True, 1), (True, 3)):
        told = told_by(lambda split=split, n=at_call: step(worker, failing_loss(n), split=split, batch=batch))
        if split:
            told = (*told, worker.train_step.phase.value)
        worker.abort_train_step()
        aborted = worker_state.differences(start, worker_state.capture(worker))
        step(worker, tiny.grpo_loss(), split=True, batch=batch)
        cleaned = worker_state.differences(wanted, worker_state.capture(worker))
        worker_state.restore(worker, start)
        found.append((told, aborted, cleaned))
    return found


@pytest.mark.quick_cases("dp2", "pp2-vpp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_that_raises_on_one_rank_ends_the_step_alike_on_all_and_abort_mends_it(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    answers = ranks(world_size).run(traces_of_a_failing_loss, sections)
    last = world_size - 1
    for rank, found in enumerate(answers):
        said = "the advantages are wrong" if rank == last else f"rank {last}: the advantages are wrong"
        tolds = [("ArithmeticError", said), *[("ArithmeticError", said, "failed")] * 2]
        assert found == [(told, [], []) for told in tolds]


def traces_of_refused_rows(sections):
    """A declared key that only the last rank's rows lack: in an open step, in `train` and in the passes that read."""
    worker = worker_state.prepared(sections)
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=7))
    of_prompts = {"prompt_index": torch.arange(batch.size), "sample_index": torch.arange(batch.size)}
    broken = tiny.BatchedDataDict(batch | of_prompts)
    if is_last_rank():
        del broken["input_ids"]
    worker.begin_train_step(tiny.grpo_loss(), gbs=16)
    worker.train_microbatch(batch.slice(0, 4))
    before = worker_state.capture(worker)
    calls = {
        "train_microbatch": lambda: worker.train_microbatch(broken),
        "train": lambda: worker.train(broken, tiny.grpo_loss(), gbs=16),
        "evaluation": lambda: worker.train(broken, tiny.grpo_loss(), gbs=16, eval_mode=True),
        "get_logprobs": lambda: worker.get_logprobs(data=broken),
        "get_topk_logits": lambda: worker.get_topk_logits(data=broken, k=2),
        "generate": lambda: worker.generate(data=broken, step=0, stop_ids=[]),
    }
    told = {name: told_by(call) for name, call in calls.items()}
    left = worker_state.differences(before, worker_state.capture(worker))
    phase = worker.train_step.phase.value
    worker.train_microbatch(batch.slice(4, batch.size))
    return told, left, phase, worker.finish_train_step()["update_successful"]


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_rows_that_one_rank_refuses_are_refused_by_all_and_the_step_stays_open(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    for rank, (told, *rest) in enumerate(ranks(world_size).run(traces_of_refused_rows, sections)):
        for kind, message in told.values():
            assert kind == "BatchError"
            assert message.startswith("the batch is refused" if rank else "rank 1: the batch is refused")
            assert "input_ids: missing" in message
        assert rest == [[], "open", True]


def traces_of_unequal_chunks(sections):
    """The first data-parallel rank adds a chunk more than the others, which finish."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker = worker_state.prepared(sections)
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=7))
    start = worker_state.capture(worker)
    worker.begin_train_step(tiny.grpo_loss(), gbs=16)
    worker.train_microbatch(batch.slice(0, 4))
    if parallel_groups.group("data").rank() == 0:
        told = told_by(lambda: worker.train_microbatch(batch.slice(4, batch.size)))
    else:
        told = told_by(worker.finish_train_step)
    worker.abort_train_step()
    left = worker_state.differences(start, worker_state.capture(worker))
    return told, left, step(worker, tiny.grpo_loss(), split=True, batch=batch)["update_successful"]


@pytest.mark.parametrize("layout", ["dp2", "dp2-pp2"])
def test_ranks_that_are_sent_different_numbers_of_chunks_are_all_told_so(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    for (kind, message), left, trains in ranks(world_size).run(traces_of_unequal_chunks, sections):
        assert kind == "UnequalChunksError"
        assert "rank 0: train_microbatch" in message
        assert f"rank {world_size - 1}: finish_train_step" in message
        assert (left, trains) == ([], True)


@contextmanager
def broken_layer(worker, rank):
    """Inside, the first layer of this rank raises, as for want of memory."""
    from megatron.core.utils import unwrap_model

    def raises(*_args):
        raise MemoryError("no memory for a layer")

    if dist.get_rank() != rank:
        yield
        return
    layer = unwrap_model(worker.backend.chunks[0]).decoder.layers[0]
    handle = layer.register_forward_pre_hook(raises)
    try:
        yield
    finally:
        handle.remove()


def traces_of_a_broken_stage(sections, rank):
    """What each call says when a layer of one stage fails, and what it leaves."""
    worker = worker_state.prepared(sections)
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=7))
    prompts = batch | {"prompt_index": torch.arange(batch.size), "sample_index": torch.arange(batch.size)}
    prompts = tiny.BatchedDataDict(
        {**prompts, "input_ids": batch["input_ids"][:, :5], "input_lengths": batch["input_lengths"] * 0 + 5}
    )
    start = worker_state.capture(worker)
    calls = {
        "get_logprobs": lambda: worker.get_logprobs(data=batch),
        "get_reference_policy_logprobs": lambda: worker.get_reference_policy_logprobs(data=batch),
        "get_topk_logits": lambda: worker.get_topk_logits(data=batch, k=2),
        "generate": lambda: worker.generate(data=prompts, step=0, stop_ids=[]),
        "evaluation": lambda: worker.train(batch, tiny.grpo_loss(), gbs=16, eval_mode=True),
        "train": lambda: worker.train(batch, tiny.grpo_loss(), gbs=16),
        "split step": lambda: step(worker, tiny.grpo_loss(), split=True, batch=batch),
    }
    told, left = {}, {}
    for name, call in calls.items():
        with broken_layer(worker, rank):
            told[name] = told_by(call)
        worker.abort_train_step()
        left[name] = worker_state.differences(start, worker_state.capture(worker))
    worker.get_logprobs(data=batch)
    worker.generate(data=prompts, step=0, stop_ids=[])
    return told, left, step(worker, tiny.grpo_loss(), split=True, batch=batch)["update_successful"]


@pytest.mark.quick_cases("pp2-first-stage", "pp2-last-stage")
@pytest.mark.parametrize("rank", [0, 1], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("layout", ["pp2", "pp2-vpp2"])
def test_a_layer_that_fails_on_one_stage_is_the_same_error_on_all(ranks, layout, rank):
    world_size, sections = LAYOUTS[layout]
    for at, (told, left, trains) in enumerate(
        ranks(world_size).run(traces_of_a_broken_stage, sections, rank)
    ):
        said = "no memory for a layer" if at == rank else f"rank {rank}: no memory for a layer"
        assert told == dict.fromkeys(told, ("MemoryError", said))
        assert left == {name: [] for name in left}
        assert trains
