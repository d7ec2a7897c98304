"""The reference policy is the start bit for bit, wherever it is kept, and the policy comes back as it was."""

from contextlib import suppress

import pytest
import tiny
import torch


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


OVERLAP = {"distributed_data_parallel_config": {"overlap_param_gather": True, "overlap_grad_reduce": True}}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip


def run_of(on_device, folder, policy):
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
        ranks(ranks_needed).run(run_of, on_device, str(tmp_path / str(on_device)), policy)
        for on_device in (True, False)
    ]
    for (start, norms), (other_start, other_norms) in zip(*runs, strict=True):
        assert (start == other_start).all()
        assert norms == other_norms
