"""The value role on real models: what a value is of, what trains, and that layouts agree."""

import numpy as np
import pytest
import tolerances

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
    import tiny

    from nemo_rl_mcore.losses import MseValueLossFn

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
    import tiny
    import torch

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


def a_constant_reward():
    """The explained variance on returns that a critic can know from the length alone, step by step."""
    import tiny
    import torch

    from nemo_rl_mcore.losses import MseValueLossFn

    worker = tiny.worker(
        tiny.policy_config(megatron={"optimizer": {"lr": 3e-3, "weight_decay": 0.0}}), role="value"
    )
    batch = tiny.grpo_batch()
    columns = torch.arange(batch["token_mask"].shape[1])
    # Reward 1 at the end of row, discounted: what remains depends on the distance to the end, which position tells.
    batch["returns"] = (0.9 ** (11.0 - columns)).expand_as(batch["token_mask"]).contiguous()
    explained = []
    for _ in range(60):
        metrics = worker.train(batch, MseValueLossFn({}))["all_mb_metrics"]
        variance = metrics["returns_sq_mean"][0] - metrics["returns_mean"][0] ** 2
        explained.append(1 - metrics["residual_sq_mean"][0] / variance)
    return explained


def the_split_step():
    import tiny

    from nemo_rl_mcore.losses import MseValueLossFn

    results = []
    for cuts in ((8,), (2, 6)):
        worker = tiny.worker(tiny.policy_config(), role="value")
        for _ in range(2):
            worker.begin_train_step(MseValueLossFn({}), gbs=8, mbs=2)
            first = 0
            for rows in cuts:
                worker.train_microbatch(tiny.returns_batch().slice(first, first + rows))
                first += rows
            worker.finish_train_step()
        results.append(tiny.parameters(worker))
    return tiny.largest_difference(*results)


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
    import tiny

    _, before, after, start, moved = critic({}, None, precision="bfloat16")
    worker = tiny.worker(tiny.policy_config(precision="bfloat16"), role="value")
    dtypes = {
        name.split("module.")[-1]: str(parameter.dtype)
        for name, parameter in worker.backend.chunks[0].named_parameters()
        if "value_head" in name
    }
    return dtypes, before, after, start, moved["0.module.module.value_head.weight"]


def test_the_split_step_of_a_critic_is_exact(ranks):
    assert ranks(1).run(the_split_step)[0] == 0


def test_the_critic_explains_returns_that_can_be_known(ranks):
    explained = ranks(1).run(a_constant_reward)[0]
    assert explained[0] < 0.1
    assert explained[-1] > 0.9
