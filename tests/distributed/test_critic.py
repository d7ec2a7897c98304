"""The value role on a real model: the state that a value belongs to, and the weights that train."""

import numpy as np
import pytest
import tiny
import tolerances
import torch

from nemo_rl_mcore.losses import MseValueLossFn


def critic(model, precision):
    """Two steps of the critic: values before and after, which weights moved, and the head's dtypes."""
    worker = tiny.worker(tiny.policy_config(model=model, precision=precision), role="value")
    start, batch = tiny.parameters(worker), tiny.returns_batch()
    before = worker.get_values(data=batch)["values"].numpy()
    for _ in range(2):
        worker.train(batch, MseValueLossFn({"cliprange": 0.2}))
    after = worker.get_values(data=batch)["values"].numpy()
    end = tiny.parameters(worker)
    moved = {name: not torch.equal(value, start[name]) for name, value in end.items()}
    return before, after, moved, {str(value.dtype) for name, value in end.items() if "value_head" in name}


def values_by_hand():
    """A head with known weights against the decoder's own output, shifted by one."""
    from nemo_rl_mcore.rank.megatron.model_class import ValueHead, modules_of

    worker = tiny.worker(tiny.policy_config(), role="value")
    (head,) = modules_of(ValueHead, worker.backend.chunks[:1])
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


def test_a_value_is_of_the_state_before_its_token(ranks):
    values, expected = ranks(1).run(values_by_hand)[0]
    assert values == pytest.approx(expected, abs=tolerances.LOGPROBS)
    assert abs(expected).max() > 0.5
    assert not values[:, 0].any()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_values_are_zero_at_the_start_and_all_but_an_output_layer_of_its_own_is_trained(
    ranks, tied, precision
):
    before, after, moved, head = ranks(1).run(critic, {"tie_word_embeddings": tied}, precision)[0]
    assert not before.any()
    assert np.isfinite(after).all()
    assert abs(after).max() > 1e-3
    assert head == {"torch.float32"}
    still = {name.split("module.")[-1] for name, has_moved in moved.items() if not has_moved}
    if precision == "float32":
        assert still == (set() if tied else {"output_layer.weight"})
    assert "value_head.weight" not in still
