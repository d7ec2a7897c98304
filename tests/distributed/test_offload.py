"""What leaves the device comes back bit for bit, and so do the reference's weights, wherever they are kept."""

from contextlib import suppress

import pytest
import tiny
import torch
import worker_state
from refusals import refused

from nemo_rl_mcore.rank.policy_backend import OnDevice
from nemo_rl_mcore.rank.train_step import TrainStepError

OVERLAP = {"distributed_data_parallel_config": {"overlap_param_gather": True, "overlap_grad_reduce": True}}
PLAIN = {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": False}}
FUSED = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip


def run_of(offload, folder, policy):
    """Everything that three steps leave behind, with reads, a checkpoint and a dropped step between them."""
    worker = tiny.worker(tiny.policy_config(offload=offload, **policy))
    loss_fn = tiny.grpo_loss(fused=worker.policy.megatron_cfg.use_fused_linear_logprobs)
    batch, reads = tiny.shard(tiny.grpo_batch(seed=9)), []

    def rows(seed):
        return tiny.shard(tiny.grpo_batch(seed=seed))

    def read():
        worker.prepare_for_lp_inference()
        reads.append(worker.get_logprobs(data=batch)["logprobs"].numpy())
        if offload == "all":
            worker.backend.keep_on_device(OnDevice.NOTHING)  # as at the end of a refit
        reads.append(worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"].numpy())
        if offload == "all":
            worker.backend.keep_on_device(OnDevice.NOTHING)

    read()  # before the optimizer has any state
    worker.train(rows(1), loss_fn)
    read()
    worker.save_checkpoint(folder)
    read()
    worker.train(batch, loss_fn, eval_mode=True)
    worker.begin_train_step(loss_fn)
    worker.train_microbatch(rows(7))
    worker.abort_train_step()
    read()
    worker.begin_train_step(loss_fn)
    worker.train_microbatch(rows(2))
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    worker.get_logprobs(data=batch)  # in an open step, whose gradients stay
    worker.finish_train_step()
    read()
    worker.load_checkpoint(folder)
    read()
    worker.prepare_for_training()
    worker.train(rows(2), loss_fn)
    worker.train(rows(3), loss_fn)
    found = worker_state.capture(worker)
    return reads, {name: value for name, value in found.items() if name != "config"}


def differences_of(folder, policy):
    plain_reads, plain = run_of("none", f"{folder}/none", policy)
    found = {}
    for offload in ("grads_optimizer", "all"):
        reads, state = run_of(offload, f"{folder}/{offload}", policy)
        found[offload] = worker_state.differences(plain, state)
        found[offload] += [
            f"read {number}"
            for number, (one, other) in enumerate(zip(plain_reads, reads, strict=True))
            if (one != other).any()
        ]
    return found


@pytest.mark.exhaustive_cases("dp1-bf16", "dp1-plain", "dp2-overlap")
@pytest.mark.parametrize(
    ("ranks_needed", "policy"),
    [
        (1, {"precision": "bfloat16"}),
        (1, {"megatron": PLAIN}),
        (1, {"precision": "bfloat16", "megatron": FUSED}),
        (1, {"sequence_packing": {"enabled": True}}),
        (2, {"megatron": OVERLAP}),
        (2, {"precision": "bfloat16", "megatron": PLAIN}),
        (2, {"precision": "bfloat16", "megatron": {"pipeline_model_parallel_size": 2}}),
        (2, {"megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
        (2, {"model": EXPERTS, "megatron": {"expert_model_parallel_size": 2}}),
        (2, {"precision": "bfloat16", "megatron": {"context_parallel_size": 2}}),
    ],
    ids=["dp1-bf16", "dp1-plain", "dp1-bf16-fused", "dp1-packed", "dp2-overlap", "dp2-plain-bf16",
         "pp2-bf16", "tp2", "ep2-bias", "cp2-bf16"],
)  # fmt: skip
def test_a_run_that_offloads_is_the_same(ranks, tmp_path, ranks_needed, policy):
    found = ranks(ranks_needed).run(differences_of, str(tmp_path), policy)
    assert found == [{"grads_optimizer": [], "all": []}] * ranks_needed


def memory_of(offload, megatron, precision):
    """Bytes of what a worker holds: after a step, ready to read, with nothing on the device, ready to train."""
    worker = tiny.worker(tiny.policy_config(offload=offload, precision=precision, megatron=megatron))
    worker.train(tiny.grpo_batch(), tiny.grpo_loss())

    def bytes_held():
        weights = [*worker.backend.chunks[0].parameters()]
        held = [tensor for weight in weights for tensor in (weight, weight.main_grad)]
        for part in worker.backend.optimizer.chained_optimizers:
            main = [weight for group in part.optimizer.param_groups for weight in group["params"]]
            held += [tensor for weight in main for tensor in (weight, weight.grad) if tensor is not None]
            held += [tensor for state in part.optimizer.state.values() for tensor in state.values()]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return sum(storages.values())

    found = [bytes_held()]
    worker.get_logprobs(data=tiny.grpo_batch())
    found.append(bytes_held())
    if offload == "all":
        worker.backend.keep_on_device(OnDevice.NOTHING)
        found.append(bytes_held())
    worker.begin_train_step(tiny.grpo_loss())
    found.append(bytes_held())
    if offload != "none":
        with refused("step-is-open", "keep_train_buffers=True", by=TrainStepError):
            worker.prepare_for_lp_inference()
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert bytes_held() == found[-1]
    worker.abort_train_step()
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert bytes_held() == found[-1]
    weights = sum(weight.nbytes for weight in worker.backend.chunks[0].parameters())
    return found, weights


@pytest.mark.each_value
@pytest.mark.parametrize(
    "megatron",
    [{}, PLAIN, {**PLAIN, "distributed_data_parallel_config": {"grad_reduce_in_fp32": False}}],
    ids=["distributed", "plain", "plain-main-gradients"],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_away_takes_no_memory(ranks, megatron, precision):
    (everything, same, still), _ = ranks(1).run(memory_of, "none", megatron, precision)[0]
    assert everything == same >= still
    (before, reading, after), weights = ranks(1).run(memory_of, "grads_optimizer", megatron, precision)[0]
    # Gradients of main weights in memory of their own come with the next step.
    assert after <= before == everything
    assert weights <= reading < 1.1 * weights < before / 3  # buckets are a little longer than their weights
    (before, reading, nothing, after), _ = ranks(1).run(memory_of, "all", megatron, precision)[0]
    assert after <= before == everything
    assert weights <= reading < 1.1 * weights
    assert nothing == 0


# The reference policy


def exchange_of_odd_weights(on_device):
    """Weights longer than a piece, of several types and without numbers, in a model that nothing wraps."""
    from nemo_rl_mcore.rank.megatron.reference_policy import PIECE_BYTES, ReferencePolicy

    model = torch.nn.Linear(3000, 1500)
    assert model.weight.nbytes > PIECE_BYTES
    model.register_buffer("counts", torch.arange(5))
    model.register_buffer("scalar", torch.tensor(float("nan")))
    model.register_parameter("halves", torch.nn.Parameter(torch.randn(7, dtype=torch.bfloat16)))

    def bits():
        parts = (*model.parameters(), *model.buffers())
        return [part.detach().clone().view(-1).view(torch.uint8) for part in parts]

    def equal(left, right):
        return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))

    start, places = bits(), [part.data_ptr() for part in model.parameters()]
    reference = ReferencePolicy([model], on_device=on_device)
    with torch.no_grad():
        for part in (*model.parameters(), model.counts):
            part.add_(1)
    trained = bits()
    found = [not equal(start, trained)]
    for _ in range(2):  # the second time with what the first one left behind
        with suppress(InterruptedError), reference.swapped_in():
            found.append(equal(bits(), start))
            raise InterruptedError
        found.append(equal(bits(), trained))
    reference.keep()
    with torch.no_grad():
        model.weight.zero_()
    with reference.swapped_in():
        found.append(equal(bits(), trained))
    return [*found, [part.data_ptr() for part in model.parameters()] == places]


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "cpu"])
def test_every_bit_is_exchanged_in_place(ranks, on_device):
    assert all(ranks(1).run(exchange_of_odd_weights, on_device)[0])


def run_of_reference(on_device, folder, policy):
    """The reference's log-probabilities in the midst of training, and after a checkpoint that the other way reads."""

    def worker(on_device, seed):
        return tiny.worker(tiny.policy_config(reference_on_device=on_device, **policy), seed=seed)

    def read(of):
        return of.get_reference_policy_logprobs(data=batch)["reference_logprobs"]

    def train(of, seed):
        return of.train(tiny.shard(tiny.grpo_batch(seed=seed)), tiny.grpo_loss())["grad_norm"].item()

    plain = worker(on_device, seed=0)
    undisturbed = [train(plain, seed) for seed in (1, 2, 3)]
    first = worker(on_device, seed=0)
    batch = tiny.shard(tiny.grpo_batch(seed=9))
    start = first.get_logprobs(data=batch)["logprobs"]
    norms = [train(first, 1)]
    assert read(first).equal(start)
    assert not first.get_logprobs(data=batch)["logprobs"].equal(start)
    first.begin_train_step(tiny.grpo_loss())
    first.train_microbatch(tiny.shard(tiny.grpo_batch(seed=2)))
    assert read(first).equal(start)
    norms.append(first.finish_train_step()["grad_norm"].item())
    first.save_checkpoint(folder)
    norms.append(train(first, 3))
    assert norms == undisturbed
    weights = tiny.parameters(first)
    other = worker(not on_device, seed=7)
    other.load_checkpoint(folder)
    assert read(other).equal(start)
    assert train(other, 3) == norms[-1]
    assert tiny.largest_difference(weights, tiny.parameters(other)) == 0.0
    return start.numpy(), norms


@pytest.mark.quick_cases("plain")
@pytest.mark.exhaustive_cases("dp2-overlap")
@pytest.mark.parametrize(
    ("ranks_needed", "policy"),
    [
        (1, {}),
        (2, {"megatron": OVERLAP}),
        (2, {"precision": "bfloat16", "megatron": {"pipeline_model_parallel_size": 2}}),
        (2, {"model": EXPERTS, "megatron": {"expert_model_parallel_size": 2}}),
    ],
    ids=["plain", "dp2-overlap", "pp2-bf16", "ep2-bias"],
)
def test_a_run_is_the_same_wherever_the_reference_is_kept(ranks, tmp_path, ranks_needed, policy):
    runs = [
        ranks(ranks_needed).run(run_of_reference, on_device, str(tmp_path / str(on_device)), policy)
        for on_device in (True, False)
    ]
    for (start, norms), (other_start, other_norms) in zip(*runs, strict=True):
        assert (start == other_start).all()
        assert norms == other_norms
