"""Replicas of parallel layouts stay in agreement, and a swap of weights waits for those still to come."""

import pytest
import tiny


def trained_weights(megatron):
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
