"""Pipeline stages of other sizes hold the layers that they should, and train as one rank does."""

import pytest
import tiny
import torch

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUTS = {
    "pp2-1-4": ((1, 4), {FIRST: 1}),
    "pp4-1-1-1-2": ((1, 1, 1, 2), {FIRST: 1, LAST: 2}),
    "pp2-2-3-hybrid": ((2, 3), {FIRST: 2, "model_class": "hybrid"}),
}
"""Layers of each stage, written down, and the keys that ask for them."""
LAYERS = 5


def two_steps(layers, keys, weights):
    """Log-probs of given weights and after two steps of them, the steps' metrics, and this rank's own weights."""
    from megatron.core import parallel_state

    megatron = keys | {"pipeline_model_parallel_size": len(layers)}
    worker = tiny.worker(tiny.policy_config(model={"num_layers": LAYERS}, megatron=megatron))
    own = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    if weights is not None:
        stage, parts = parallel_state.get_pipeline_model_parallel_rank(), worker.policy.parts_of_a_layer
        held = {int(name.split("layers.")[1].split(".")[0]) for name in own if "layers." in name}
        assert held == {*range(layers[stage] * parts)}
        _fill(worker, weights, sum(layers[:stage]))
    batch = tiny.grpo_batch()
    before = worker.get_logprobs(data=batch)["logprobs"].numpy()
    steps = [worker.train(tiny.shard(tiny.grpo_batch(seed=step)), tiny.grpo_loss()) for step in range(2)]
    metrics = [step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in steps]
    return own, before, metrics, worker.get_logprobs(data=batch)["logprobs"].numpy()


def _fill(worker, weights, first):
    """Fill this stage, whose layers begin with `first` of the whole model, with those of a single rank."""
    for name, parameter in worker.backend.chunks[0].named_parameters():
        head, found, tail = name.partition("decoder.layers.")
        if found:
            number, rest = tail.split(".", 1)
            layer = int(number) // worker.policy.parts_of_a_layer + first
            name = f"{head}{found}{layer}.{rest}"
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(weights[f"0.{name}"]))
    worker.backend.weights_replaced()


@pytest.fixture(scope="module")
def single_rank(ranks):
    return ranks(1).run(two_steps, (LAYERS,), {}, None)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uneven_stages_equal_one_rank(ranks, single_rank, layout):
    layers, keys = LAYOUTS[layout]
    weights, logprobs, steps, after = single_rank
    for _, own, own_steps, own_after in ranks(len(layers)).run(two_steps, layers, keys, weights):
        assert own == pytest.approx(logprobs, abs=2e-5)
        for metrics, reference in zip(own_steps, steps, strict=True):
            assert metrics.keys() == reference.keys()
            for name in reference:
                assert metrics[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name
        assert own_after == pytest.approx(after, abs=2e-4)
    assert abs(after - logprobs).max() > 1e-2
