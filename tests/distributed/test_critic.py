"""The value role on real models: what a value is of, what trains, and that layouts agree."""

import numpy as np
import pytest
import tiny
import tolerances
import torch

from nemo_rl_mcore.losses import MseValueLossFn

LAYOUTS = {
    "dp2-overlap": {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 3000}},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2-overlap": {
        "pipeline_model_parallel_size": 2,
        "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "cp2": {"context_parallel_size": 2},
}


def critic(megatron, weights, model=None, steps=2, precision="float32"):
    """Steps of the critic: metrics, values before and after, the weights at the start and which of them moved."""
    config = tiny.policy_config(model=model, megatron=megatron, precision=precision)
    worker = tiny.worker(config, role="value")
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    start = tiny.parameters(worker)
    batch = tiny.returns_batch()
    before = worker.get_values(data=batch)["values"].numpy()
    results = [
        worker.train(tiny.shard(batch), MseValueLossFn({"cliprange": 0.2}))["all_mb_metrics"]
        for _ in range(steps)
    ]
    after = worker.get_values(data=batch)["values"].numpy()
    moved = {
        name: float((value - start[name]).abs().max()) > 0 for name, value in tiny.parameters(worker).items()
    }
    return results, before, after, {name: value.float().numpy() for name, value in start.items()}, moved


def values_by_hand():
    """A head with known weights against the decoder's own output, shifted by one."""
    from nemo_rl_mcore.rank.megatron.value_head import value_head_of

    worker = tiny.worker(tiny.policy_config(), role="value")
    head = value_head_of(worker.backend.chunks[0])
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
        head.bias.fill_(0.5)
    batch = tiny.grpo_batch()
    seen = []
    model = worker.backend.chunks[0].module
    handle = model.decoder.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    values = worker.get_values(data=batch, micro_batch_size=batch.size)["values"]
    handle.remove()
    hidden_SBH = seen[0].double()
    expected = torch.zeros_like(values)
    for row in range(batch.size):
        for column in range(1, int(batch["input_lengths"][row])):
            state = hidden_SBH[column - 1, row]
            expected[row, column] = (state @ head.weight.double()).float() + 0.5
    return values.numpy(), expected.detach().numpy()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return {"tie_word_embeddings": request.param}


@pytest.fixture(scope="module")
def single_rank(ranks, tied):
    return ranks(1).run(critic, {}, None, tied)[0]


def test_a_value_is_of_the_state_before_its_token(ranks):
    values, expected = ranks(1).run(values_by_hand)[0]
    assert values == pytest.approx(expected, abs=tolerances.LOGPROBS)
    assert abs(expected).max() > 0.5
    assert not values[:, 0].any()


def test_values_are_zero_at_the_start_and_only_an_output_layer_of_its_own_stays(single_rank, tied):
    _, before, after, _, moved = single_rank
    assert not before.any()
    assert abs(after).max() > 1e-3
    still = sorted(name for name, has_moved in moved.items() if not has_moved)
    own = [] if tied["tie_word_embeddings"] else ["output_layer.weight"]
    assert [name.split("module.")[-1] for name in still] == own


@pytest.mark.quick_cases("untied-dp2-overlap", "untied-tp2-sp", "untied-cp2", "tied-pp2-overlap")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_critic_as_one_does(ranks, single_rank, tied, layout):
    results, _, after, weights, _ = single_rank
    for own_results, _, own_after, _, _ in ranks(2).run(critic, LAYOUTS[layout], weights, tied):
        for own, reference in zip(own_results, results, strict=True):
            assert own.keys() == reference.keys()
            for name in reference:
                assert own[name] == pytest.approx(reference[name], rel=2e-4, abs=2e-5), name
        assert own_after == pytest.approx(after, abs=2e-4)


def test_the_head_stays_fp32_in_a_16_bit_critic(ranks):
    results, _, after, _, moved = ranks(1).run(critic_dtypes)[0]
    assert results == {"value_head.weight": "torch.float32", "value_head.bias": "torch.float32"}
    assert np.isfinite(after).all()
    assert moved


def critic_dtypes():
    _, before, after, start, moved = critic({}, None, precision="bfloat16")
    worker = tiny.worker(tiny.policy_config(precision="bfloat16"), role="value")
    dtypes = {
        name.split("module.")[-1]: str(parameter.dtype)
        for name, parameter in worker.backend.chunks[0].named_parameters()
        if "value_head" in name
    }
    return dtypes, before, after, start, moved["0.module.module.value_head.weight"]
