"""The reduction that begins within the backward pass: the bits of one at the step's end, and no trace of a failure."""

from contextlib import contextmanager

import injection
import pytest
import tiny
import torch
import torch.distributed as dist
import worker_state
from injection import IN_BEGIN, IN_FINALIZE, IN_FINISH, Point
from tolerances import REORDERED

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}
TIED = {"tie_word_embeddings": True}
PLAIN = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
FOUR = {"num_layers": 4}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERT = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SMALL_BUCKETS = 3000

# Name: number of ranks, then the sections of the policy.
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {"model": TIED}),
    "dp2-plain-optimizer": (2, {"megatron": PLAIN}),
    "dp2-fused": (2, {"megatron": {"use_fused_linear_logprobs": True}}),
    "dp2-recompute": (2, {"megatron": {"activation_checkpointing": True}}),
    "dp2-param-gather": (2, {"megatron": {"overlap_param_gather": True}}),
    "dp2-bf16": (2, {"precision": "bfloat16"}),
    "dp2-bf16-reduction": (2, {"precision": "bfloat16", "megatron": {"grad_reduce_in_fp32": False}}),
    "dp2-packed": (2, {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}}),
    "dp2-experts": (2, {"model": EXPERTS}),
    "dp2-prediction-layers": (2, {"model": {"mtp_num_layers": 1}}),
    "ep2": (2, {"model": EXPERTS, "megatron": EXPERT}),
    "dp2-tp2-sp": (4, {"megatron": TENSOR}),
    "dp2-pp2": (4, {"model": TIED, "megatron": PIPELINE}),
    "dp2-pp2-plain-optimizer": (4, {"megatron": PIPELINE | PLAIN}),
    "dp2-pp2-vpp2": (4, {"model": FOUR, "megatron": INTERLEAVED}),
    "cp2": (2, {"megatron": CONTEXT}),
    "cp2-pp2-vpp2": (4, {"model": FOUR, "megatron": CONTEXT | INTERLEAVED}),
    "dp4-ep2": (4, {"model": EXPERTS, "megatron": EXPERT}),
    "dp2-tp2-sp-ep2": (4, {"model": EXPERTS, "megatron": TENSOR | EXPERT}),
}


def policy(sections, *, overlap, bucket_size=SMALL_BUCKETS):
    megatron = dict(sections.get("megatron", {}))
    ddp = {"overlap_grad_reduce": overlap, "bucket_size": bucket_size} | {
        key: megatron.pop(key) and (overlap or key != "overlap_param_gather")
        for key in ("grad_reduce_in_fp32", "overlap_param_gather")
        if key in megatron
    }
    # Without clipping: buckets of another size have a norm that is summed in another order.
    sections = sections | {"max_grad_norm": 0.0}
    return tiny.policy_config(**sections | {"megatron": megatron | {"distributed_data_parallel_config": ddp}})


def rows_of_rank(seed):
    """Eight rows; on the last of several ranks no one of them has a token to train on in every other step."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    size = parallel_groups.group("data").size()
    batch = tiny.shard(tiny.grpo_batch(rows=8 * size, seed=seed))
    if seed % 2 and size > 1 and parallel_groups.group("data").rank() == size - 1:
        batch["sample_mask"] = batch["sample_mask"] * 0
    return batch, 8 * size


@contextmanager
def counted_reductions(worker, found):
    """Adds to `found` how many reductions of the first chunk are in flight near the end of each of its backward passes.

    It is where the gradient of the first parameter comes, whose own reduction has not begun by then.
    """
    groups, first = groups_of_first_chunk(worker), next(worker.backend.chunks[0].parameters())
    handle = first.register_hook(
        lambda _gradient: found.append(sum(group.grad_reduce_handle is not None for group in groups))
    )
    try:
        yield
    finally:
        handle.remove()


def groups_of_first_chunk(worker):
    from nemo_rl_mcore.rank.megatron.train_backend import bucket_groups

    return bucket_groups(worker.backend.chunks[:1])


def four_steps(config, fused, *, split):
    """The worker's parameters, the gradients' norms, and the reductions in flight late in each pass of each step."""
    worker = tiny.worker(config, init_reference_model=False)
    loss_fn, norms, in_flight = tiny.grpo_loss(fused=fused), [], []
    for seed, mbs in enumerate((2, 2, 4, 2)):  # Megatron must not learn the number of microbatches
        batch, gbs = rows_of_rank(seed)
        in_flight.append([])
        with counted_reductions(worker, in_flight[-1]):
            if split:
                worker.begin_train_step(loss_fn, gbs=gbs, mbs=mbs)
                worker.train_microbatch(batch)
                result = worker.finish_train_step()
            else:
                result = worker.train(batch, loss_fn, gbs=gbs, mbs=mbs)
        assert result["update_successful"]
        norms.append(float(result["grad_norm"]))
    worker.get_logprobs(
        data=batch
    )  # gathers the weights, which `overlap_param_gather` leaves to a forward pass
    several = len(groups_of_first_chunk(worker)) > 1
    return tiny.parameters(worker), norms, in_flight if several else None


def compared(sections):
    """Of `train` with overlap: what differs from the split step, and from `train` without, by how much at most."""
    fused = sections.get("megatron", {}).get("use_fused_linear_logprobs", False)
    found, norms, in_flight = four_steps(policy(sections, overlap=True), fused, split=False)
    split, split_norms, split_in_flight = four_steps(policy(sections, overlap=True), fused, split=True)
    plain, _, _ = four_steps(policy(sections, overlap=False), fused, split=False)
    differing = [name for name in found if not torch.equal(found[name], split[name])]
    differing += ["norms"] * (norms != split_norms)
    return differing, tiny.largest_difference(found, plain), in_flight, split_in_flight


def late_in_the_last_pass_alone(in_flight):
    """Whether each step but the first, in which Megatron learns, reduces in its last backward pass and no other."""
    first, *others = in_flight
    return not any(first) and all(passes[:-1] and not any(passes[:-1]) and passes[-1] for passes in others)


@pytest.mark.quick_cases("dp2")
@pytest.mark.exhaustive_cases("dp2-plain-optimizer", "ep2", "dp2-pp2", "cp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_that_overlaps_has_the_bits_of_the_split_step_and_of_no_overlap(ranks, layout):
    world_size, sections = LAYOUTS[layout]
    # Without overlap there is one bucket, in which more than two ranks add up in another order.
    tolerance = REORDERED if layout.startswith("dp4") else 0.0
    overlapped = []
    for differing, from_plain, in_flight, split_in_flight in ranks(world_size).run(compared, sections):
        assert differing == []
        assert from_plain <= tolerance
        if in_flight is not None:
            overlapped.append(late_in_the_last_pass_alone(in_flight))
            assert not any(map(any, split_in_flight))
    assert overlapped
    assert all(overlapped)


def train(worker, seed):
    """A step of two microbatches a rank."""
    batch = tiny.shard(tiny.grpo_batch(rows=16, seed=seed))
    return worker.train(batch, tiny.grpo_loss(), gbs=16, mbs=4)


def told_of_failing(worker, point):
    """Whether `train` raises what was injected on this rank or another; with point None here, nothing is."""
    with injection.failing(worker, point):
        try:
            train(worker, seed=7)
        except injection.InjectedError:
            return True
    return False


def traces_of_failures(sections, points):
    """For each rank's points in turn: what differs once `train` has raised, and after the step that follows."""
    worker = tiny.worker(policy(sections, overlap=True), init_reference_model=False)
    train(worker_state.with_dropout(worker), seed=9)
    worker.backend.zero_grad()
    start = worker_state.capture(worker)
    train(worker, seed=1)
    wanted = worker_state.capture(worker)
    found = {}
    for point_of_rank in points:
        worker_state.restore(worker, start)
        told = told_of_failing(worker, point_of_rank[dist.get_rank()])
        left = worker_state.differences(start, worker_state.capture(worker))
        train(worker, seed=1)
        left += worker_state.differences(wanted, worker_state.capture(worker))
        if left or not told:
            found[" | ".join(map(str, point_of_rank))] = told, left
    return found


def traces_after_a_backward_pass():
    """The failure of one rank that leaves the most behind: all reductions are in flight on both."""
    return traces_of_failures({}, [(ALONE[-1], None)])


ALONE = (
    *IN_BEGIN,
    Point("forward_backward", "before"),
    Point("forward_backward", "after the first backward pass"),
    Point("forward_backward", "inside the second backward pass"),
    Point("forward_backward", "after"),
)
TOGETHER = (
    Point("reduce_counts", "before"),
    Point("reduce_counts", "after"),
    *(point for point in IN_FINISH if point.call != "scale_gradients"),
    IN_FINALIZE,
)


@pytest.mark.exhaustive_cases("dp2")
@pytest.mark.parametrize("layout", ["dp2", "dp2-plain-optimizer", "dp2-experts"])
def test_a_failure_leaves_no_trace_on_any_rank_whatever_is_in_flight(ranks, layout):
    _, sections = LAYOUTS[layout]
    points = [(point, None) for point in ALONE] + [(None, ALONE[-2])] + [(point, point) for point in TOGETHER]
    assert ranks(2).run(traces_of_failures, sections, points) == [{}, {}]


def three_steps_after(point_of_rank):
    """Reductions in flight late in each pass, and parameters; before, unless None, a step failed, the first of all."""
    worker = tiny.worker(policy({}, overlap=True), init_reference_model=False)
    told = point_of_rank is not None and told_of_failing(worker, point_of_rank[dist.get_rank()])
    in_flight = [[], [], []]
    for seed, found in enumerate(in_flight):
        with counted_reductions(worker, found):
            train(worker, seed)
    return told, in_flight, {name: value.numpy() for name, value in tiny.parameters(worker).items()}


@pytest.mark.exhaustive
def test_a_rank_that_fails_in_the_first_step_learns_later_and_the_others_wait_for_it(ranks):
    point = Point("forward_backward", "inside the second backward pass")
    failed, clean = (ranks(2).run(three_steps_after, points) for points in ((None, point), None))
    for (told, in_flight, found), (_, clean_in_flight, wanted) in zip(failed, clean, strict=True):
        assert told
        assert in_flight == clean_in_flight
        assert late_in_the_last_pass_alone(in_flight), in_flight
        assert not [name for name in wanted if (found[name] != wanted[name]).any()]
