"""Losses of real models: of pairs, which stay whole, and of a critic."""

import numpy as np
import pytest
import tiny
import tolerances
import torch
from refusals import refused

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn, MseValueLossFn

LENGTHS = [13, 12, 13, 4, 12, 12, 6, 7]
BETA = 1.0


def pairs():
    """Four pairs of uneven rows; of the last pair the rejected row is masked, which its chosen row overrules."""
    batch = tiny.grpo_batch(rows=8, length=13)
    real = torch.arange(13) < torch.tensor(LENGTHS).unsqueeze(1)
    batch["input_lengths"] = torch.tensor(LENGTHS)
    batch["input_ids"] = batch["input_ids"].clamp(min=1) * real
    batch["token_mask"] = (real & (torch.arange(13) >= 2)).float()
    batch["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 0])
    return batch


def worker():
    sizes = {"train_micro_batch_size": 2, "train_global_batch_size": 4, "max_total_sequence_length": 13}
    return tiny.worker(tiny.policy_config(**sizes))


def by_formula(of, batch):
    """(loss, accuracy) from the worker's log-probabilities: conventions' sums over chosen rows."""
    logprobs = of.get_logprobs(data=batch)["logprobs"].double()[:, 1:]
    reference = batch["reference_policy_logprobs"].double()[:, :-1]
    rewards = ((logprobs - reference) * batch["token_mask"][:, 1:]).sum(1)
    chosen, rejected, kept = rewards[::2], rewards[1::2], batch["sample_mask"][::2]
    loss = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))
    count = batch["sample_mask"].sum() / 2
    return float((loss * kept).sum() / count), float(((chosen > rejected) * kept).sum() / count)


def steps_of_pairs():
    whole, loss_fn, codes = worker(), DPOLossFn({"reference_policy_kl_penalty": BETA}), []
    for rows, sizes in ((4, {"gbs": 3}), (4, {"gbs": 4, "mbs": 1}), (6, {"gbs": 4})):
        with pytest.raises(RefusedError) as caught:
            whole.train(pairs().slice(0, rows), loss_fn, **sizes)
        codes.append(caught.value.code)
    wanted = by_formula(whole, pairs())
    split = worker()
    found = [whole.train(pairs(), loss_fn)["all_mb_metrics"]]
    split.begin_train_step(loss_fn)
    split.train_microbatch(pairs().slice(0, 4))
    with refused("batch", "3 rows", 2):
        split.train_microbatch(pairs().slice(4, 7))
    split.train_microbatch(pairs().slice(4, 8))
    found.append(split.finish_train_step()["all_mb_metrics"])
    return codes, wanted, [(step["loss"][0], step["accuracy"][0]) for step in found]


def test_pairs_have_the_loss_of_the_formula_and_half_a_pair_leaves_an_open_step_open(ranks):
    ((codes, wanted, found),) = ranks(1).run(steps_of_pairs)
    assert codes == ["rows-per-sample", "rows-per-sample", "rows-per-step"]
    for step in found:
        assert step == pytest.approx(wanted, rel=1e-5)


def prediction_scale():
    """The scale of a prediction layer's loss over four pairs, and what it is to be."""
    of, loss_fn, batch = (
        tiny.worker(tiny.policy_config(model={"mtp_num_layers": 1})),
        DPOLossFn({}),
        pairs(),
    )
    forward = of.backend.forward
    (microbatch,) = forward.batching.microbatches(batch, 8, loss_fn.rows_per_sample)
    kept = batch["sample_mask"].view(-1, 2).amax(1).repeat_interleave(2)
    predicted = (batch["token_mask"][:, 1:] * kept[:, None]).sum()
    return forward.auxiliary.terms(microbatch, loss_fn).prediction, float(
        batch["sample_mask"].sum() / predicted
    )


def test_prediction_layers_count_the_tokens_of_whole_pairs(ranks):
    found, wanted = ranks(1).run(prediction_scale)[0]
    assert found == pytest.approx(wanted, rel=1e-6)


# The value role


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
