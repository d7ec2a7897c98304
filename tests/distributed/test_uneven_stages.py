"""Pipeline stages of other sizes hold the layers that they should, and train as one rank does."""

import pytest
from as_one_rank import assert_equal_to_one

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "embedding_in_pipeline_split", "loss_in_pipeline_split"
LAYOUTS = {
    "pp2-1-4": ((1, 4), {FIRST: 1}),
    "pp4-1-1-1-2": ((1, 1, 1, 2), {FIRST: 1, LAST: 2}),
    "pp2-2-3-hybrid": ((2, 3), {f"account_for_{EMBEDDING}": True, "model_class": "hybrid"}),
    "pp2-3-2-loss": ((3, 2), {f"account_for_{LOSS}": True}),
}
"""Layers of each stage, written down, and the keys that ask for them."""
LAYERS = 5


def two_steps(layers, keys, weights, shift):
    """Log-probs of given weights and after two steps of them, the steps' metrics, and this rank's own weights.

    layers: of each stage. shift: by how many layers the given weights are put into a wrong place.
    """
    import tiny
    from megatron.core import parallel_state

    megatron = keys | {"pipeline_model_parallel_size": len(layers)}
    worker = tiny.worker(tiny.policy_config(model={"num_layers": LAYERS}, megatron=megatron))
    own = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    if weights is not None:
        stage, parts = parallel_state.get_pipeline_model_parallel_rank(), worker.policy.parts_of_a_layer
        held = {int(name.split("layers.")[1].split(".")[0]) for name in own if "layers." in name}
        assert held == {*range(layers[stage] * parts)}
        _fill(worker, weights, sum(layers[:stage]) + shift)
    batch = tiny.grpo_batch()
    before = worker.get_logprobs(data=batch)["logprobs"].numpy()
    steps = [worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss()) for step in range(2)]
    metrics = [step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in steps]
    return own, before, metrics, worker.get_logprobs(data=batch)["logprobs"].numpy()


def _fill(worker, weights, first):
    """Fill this stage, whose layers begin with `first` of the whole model, with those of a single rank."""
    import torch

    for name, parameter in worker.backend.chunks[0].named_parameters():
        head, found, tail = name.partition("decoder.layers.")
        if found:
            number, rest = tail.split(".", 1)
            layer = int(number) // worker.policy.parts_of_a_layer + first
            name = f"{head}{found}{layer % LAYERS}.{rest}"
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(weights[f"0.{name}"]))
    worker.backend.weights_replaced()


@pytest.fixture(scope="module")
def single_rank(ranks):
    return ranks(1).run(two_steps, (LAYERS,), {}, None, 0)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uneven_stages_equal_one_rank(ranks, single_rank, layout):
    layers, keys = LAYOUTS[layout]
    found = ranks(len(layers)).run(two_steps, layers, keys, single_rank[0], 0)
    assert_equal_to_one(found, single_rank)


def test_a_stage_with_the_layers_of_another_is_found(ranks, single_rank):
    weights, logprobs, _, _ = single_rank
    layers, keys = LAYOUTS["pp2-1-4"]
    for _, own_logprobs, _, _ in ranks(2).run(two_steps, layers, keys, weights, 1):
        assert abs(own_logprobs - logprobs).max() > 1e-3
