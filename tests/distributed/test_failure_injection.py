"""A backend that fails at any of its calls: abort restores every bit, and the next step equals one without the failure.

Where one rank alone fails in begin or in a chunk, its peers hear of it and fail alike.
"""

from contextlib import suppress

import injection
import pytest
import tiny
import torch
import torch.distributed as dist
import worker_state
from injection import IN_BEGIN, IN_FINISH, IN_MICROBATCH, IN_OPTIMIZER, InjectedError, Point, failing

from nemo_rl_mcore.rank.train_step import EMPTY_STEP, TrainStepError

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
BALANCED = EXPERTS | {"moe_aux_loss_coeff": 0.1}
# The bias of the experts is a state that finalising the gradients moves, before the optimizer.
BIASED = EXPERTS | {
    "moe_aux_loss_coeff": 0.0,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.1,
}
TIED = {"tie_word_embeddings": True}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}}
PLAIN = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}

# Name: number of ranks, then the sections of the policy.
LAYOUTS = {
    "one-fp32": (1, {}),
    "one-bf16": (1, {"precision": "bfloat16"}),
    "one-experts": (1, {"model": BALANCED}),
    "one-experts-bias": (1, {"model": BIASED}),
    "dp2": (2, {}),
    "dp2-overlap": (2, {"megatron": OVERLAP}),
    "tp2-sp": (2, {"megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "cp2": (2, {"megatron": {"context_parallel_size": 2}}),
    "pp2": (2, {"model": TIED, "megatron": {"pipeline_model_parallel_size": 2} | PLAIN}),
}


def split_step(worker, *, seed, finish=True):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=seed))
    worker.begin_train_step(tiny.grpo_loss(), gbs=16)
    worker.train_microbatch(batch.slice(0, 2))
    with get_cuda_rng_tracker().fork():
        torch.rand(3)
    worker.train_microbatch(batch.slice(2, batch.size))
    return worker.finish_train_step() if finish else None


def clean_step(worker, start):
    """The state after a step from `start` that nothing disturbed; the worker stands at `start` again."""
    assert split_step(worker, seed=1)["update_successful"]
    wanted = worker_state.capture(worker)
    worker_state.restore(worker, start)
    left_over = worker_state.differences(start, worker_state.capture(worker))
    assert left_over == [], left_over
    assert worker_state.differences(start, wanted) != []
    return wanted


def fail_and_abort(worker, points, finish):
    """points: where each rank fails; None for one that only hears of it."""
    with injection.failing(worker, points[dist.get_rank()]):
        try:
            split_step(worker, seed=7, finish=finish)
        except injection.InjectedError:
            failed = True
        else:
            failed = False
    assert failed == any(points), points
    worker.abort_train_step()


def traces_of_failures(sections, points):
    """For each rank's points in turn: what differs after the abort, and after the clean step that follows."""
    worker = worker_state.prepared(sections, init_reference_model=False)
    start = worker_state.capture(worker)
    wanted = clean_step(worker, start)
    found = {}
    for point_of_rank in points:
        everyone_fails = all(point_of_rank)
        fail_and_abort(worker, point_of_rank, finish=everyone_fails)
        aborted = worker_state.differences(start, worker_state.capture(worker))
        assert split_step(worker, seed=1)["update_successful"]
        cleaned = worker_state.differences(wanted, worker_state.capture(worker))
        if aborted or cleaned:
            found[" | ".join(map(str, point_of_rank))] = {"abort": aborted, "clean step": cleaned}
        worker_state.restore(worker, start)
    return found


def traces_after_a_chunk():
    """The failure of one rank that leaves the most behind: gradients of two chunks, draws, held-back hooks."""
    return traces_of_failures({}, [(IN_MICROBATCH[-1],)])


@pytest.mark.quick_cases("one-bf16", "dp2-overlap", "pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_on_all_ranks_leaves_no_trace(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    points = [*IN_BEGIN, *IN_MICROBATCH, *IN_FINISH, injection.IN_FINALIZE]
    if layout != "pp2":  # there the other stage would wait for the gradient
        points.append(injection.IN_BACKWARD)
    on_all = [(point,) * world_size for point in points]
    assert ranks(world_size).run(traces_of_failures, sections, on_all) == [{}] * world_size


def test_a_failure_on_one_rank_leaves_no_trace_on_any(ranks):
    alone = [(point, None) for point in (*IN_BEGIN, *IN_MICROBATCH, injection.IN_BACKWARD)]
    assert ranks(2).run(traces_of_failures, {}, alone) == [{}, {}]


def test_ranks_that_fail_at_different_points_leave_no_trace(ranks):
    """Between two collectives one rank may fail early and the other late: neither waits for the other."""
    staggered = [
        (Point("reduce", "after"), Point("finalize_gradients", "before")),
        (Point("scale_gradients", "after"), Point("learning_rate_and_weight_decay", "before")),
        (Point("finalize_gradients", "after"), Point("gradient_norm", "before")),
    ]
    assert ranks(2).run(traces_of_failures, {}, staggered) == [{}, {}]


def traces_of_skipped_steps(sections):
    """What steps that are empty, or not finite, change besides the gradient buckets."""
    worker = worker_state.prepared(sections, init_reference_model=False)
    start = worker_state.capture(worker)
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=7))
    not_finite = batch["advantages"] * float("nan")
    found = {}
    for replaced in ({"sample_mask": batch["sample_mask"] * 0}, {"advantages": not_finite}):
        worker.begin_train_step(tiny.grpo_loss(), gbs=16)
        worker.train_microbatch(tiny.BatchedDataDict(batch | replaced))
        (reason,) = worker.finish_train_step()["skip_reasons"]
        worker.backend.zero_grad()
        found[reason] = worker_state.differences(start, worker_state.capture(worker))
    return found


@pytest.mark.parametrize("layout", ["one-experts-bias", "dp2-overlap", "pp2"])
def test_a_skipped_step_leaves_no_trace(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    for found in ranks(world_size).run(traces_of_skipped_steps, sections):
        assert found == {EMPTY_STEP: [], "the loss is nan": []}


def failure_in_the_optimizer(sections, point):
    """What abort says after the failure, twice; the state's changes in between; whether later calls are refused."""
    worker = worker_state.prepared(sections, init_reference_model=False)
    with failing(worker, point), pytest.raises(InjectedError):
        split_step(worker, seed=7)
    failed = worker_state.capture(worker)
    said = []
    for call in (
        worker.abort_train_step,
        worker.abort_train_step,
        lambda: worker.begin_train_step(tiny.grpo_loss()),
        lambda: worker.train(tiny.shard(tiny.grpo_batch()), tiny.grpo_loss()),
        worker.finish_train_step,
    ):
        try:
            call()
        except TrainStepError as error:
            said.append(error.code)
    return said, worker_state.differences(failed, worker_state.capture(worker))


@pytest.mark.parametrize("layout", ["one-bf16", "dp2", "pp2"])
@pytest.mark.parametrize("point", IN_OPTIMIZER, ids=str)
def test_a_failure_in_the_optimizer_is_an_unknown_outcome(ranks, layout, point):
    world_size, sections = LAYOUTS[layout]
    for said, changed in ranks(world_size).run(failure_in_the_optimizer, sections, point):
        assert said == ["weights-unknown"] * 2 + ["step-is-failed"] * 3
        assert changed == []


def test_the_rank_whose_optimizer_failed_says_so_while_its_peer_has_committed(ranks):
    failed, committed = ranks(2).run(outcome_on_each_rank, (Point("optimizer_step", "after"), None))
    assert failed == "weights-unknown"
    assert committed == "idle"


def outcome_on_each_rank(point_of_rank):
    worker = worker_state.prepared({}, init_reference_model=False)
    with suppress(InjectedError), failing(worker, point_of_rank[dist.get_rank()]):
        split_step(worker, seed=7)
    try:
        worker.abort_train_step()
    except TrainStepError as error:
        return error.code
    return worker.train_step.phase.value


def notes_of_train():
    worker = worker_state.prepared({}, init_reference_model=False)
    with failing(worker, IN_OPTIMIZER[0]), pytest.raises(InjectedError) as caught:
        worker.train(tiny.grpo_batch(rows=16, seed=7), tiny.grpo_loss(), gbs=16)
    return getattr(caught.value, "__notes__", [])


def test_an_error_of_train_whose_outcome_is_unknown_names_the_checkpoint(ranks):
    (notes,) = ranks(1).run(notes_of_train)
    assert len(notes) == 1
    assert "checkpoint" in notes[0]
