"""Parallel layouts compute what one rank computes: same log-probabilities, same step, replicas in agreement."""

import pytest
from as_one_rank import assert_equal_to_one

TWO_RANKS = {
    "dp2": {},
    "dp2-plain-optimizer": {
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}
    },
    "dp2-overlap": {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}},
    "dp2-recompute": {"activation_checkpointing": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


def log_probabilities_and_metrics(megatron, weights, fused):
    """Two steps from given full weights (or this rank's own): log-probs, metrics, and the full weights at the start."""
    import tiny

    allowed = fused and megatron.get("context_parallel_size", 1) > 1
    own = {"use_fused_linear_logprobs": fused, "fused_linear_logprobs_context_parallel": allowed}
    config = tiny.policy_config(megatron=megatron | own)
    worker = tiny.worker(config)
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    logprobs = worker.get_logprobs(data=tiny.grpo_batch())["logprobs"]
    own = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    steps = [
        worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss(fused=fused)) for step in range(2)
    ]
    after = worker.get_logprobs(data=tiny.grpo_batch())["logprobs"]
    return (
        own,
        logprobs.numpy(),
        [step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in steps],
        after.numpy(),
    )


@pytest.fixture(scope="module")
def single_rank(ranks):
    """What one rank computes, and its weights: the reference of all layouts."""
    return ranks(1).run(log_probabilities_and_metrics, {}, None, False)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_equal_one(ranks, single_rank, layout, fused):
    found = ranks(2).run(log_probabilities_and_metrics, TWO_RANKS[layout], single_rank[0], fused)
    assert_equal_to_one(found, single_rank)


def trained_weights(megatron):
    import tiny

    worker = tiny.worker(tiny.policy_config(model={"tie_word_embeddings": True}, megatron=megatron))
    for step in range(3):
        worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss())
    return {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_stay_equal_on_tensor_parallel_ranks(ranks, sequence_parallel):
    first, second = ranks(2).run(
        trained_weights, {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    )
    norms = [name for name in first if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        assert (first[name] == second[name]).all(), name
        assert abs(first[name] - 1).max() > 1e-3, f"{name} was not trained"


def test_tied_embeddings_stay_equal_on_first_and_last_stage(ranks):
    first, last = ranks(2).run(trained_weights, {"pipeline_model_parallel_size": 2})
    embedding = first["0.module.embedding.word_embeddings.weight"]
    assert (embedding == last["0.module.output_layer.weight"]).all()


def test_data_parallel_ranks_hold_equal_weights(ranks):
    first, second = ranks(2).run(trained_weights, {})
    assert first.keys() == second.keys()
    for name in first:
        assert (first[name] == second[name]).all(), name


def logprobs_after_a_reference_pass(overlap):
    import tiny

    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": overlap, "bucket_size": 3000}
    worker = tiny.worker(tiny.policy_config(megatron={"distributed_data_parallel_config": ddp}))
    batch = tiny.grpo_batch()
    worker.train(tiny.shard(batch), tiny.grpo_loss())
    # With the overlap, the new weights are gathered by the first forward pass, which here is the reference's.
    reference = worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"]
    return reference.numpy(), worker.get_logprobs(data=batch)["logprobs"].numpy()


def test_the_reference_swap_gathers_weights_that_are_still_to_come(ranks):
    plain, overlapped = (ranks(2).run(logprobs_after_a_reference_pass, flag) for flag in (False, True))
    for (reference, policy), (other_reference, other_policy) in zip(plain, overlapped, strict=True):
        assert (reference == other_reference).all()
        assert (policy == other_policy).all()
        assert abs(policy - reference).max() > 1e-3
