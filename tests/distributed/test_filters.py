"""A policy under top-k and top-p: log-probabilities and gradients against those of all logits, and the split step."""

import pytest
import tiny
import torch
from plain_filters import filtered_logprobs
from tolerances import GRADIENTS, LOGPROBS, SPLIT_STEP

FILTERS = {"top_k": 20, "top_p": 0.9}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def filtering_worker(megatron=None, precision="float32"):
    generation = {"max_new_tokens": 4, "temperature": 0.7, **FILTERS}
    return tiny.worker(tiny.policy_config(precision=precision, megatron=megatron, generation=generation))


def plain_outputs(worker, batch, filters):
    """Next tokens' log-probabilities and entropy in float64, from all logits of Megatron's own path."""
    ids, length = batch["input_ids"], batch["input_ids"].shape[1]
    causal = torch.ones(1, 1, length, length).triu(1).bool()
    positions = torch.arange(length).expand(len(ids), -1)
    logits = worker.backend.chunks[0](ids, positions, causal, runtime_gather_output=True)
    return filtered_logprobs(logits[:, :-1].double(), ids[:, 1:], 0.7, **filters)


def filtered_pass(megatron, precision):
    """`get_logprobs`, and what it should be; the same of the reference, which is not filtered."""
    worker, batch = filtering_worker(megatron, precision), tiny.grpo_batch()
    real = torch.arange(12)[1:] < batch["input_lengths"].unsqueeze(1)
    found = worker.get_logprobs(data=batch)["logprobs"]
    reference = worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"]
    with torch.no_grad():
        wanted, unfiltered = (plain_outputs(worker, batch, filters)[0] for filters in (FILTERS, {}))
    pairs = (found, wanted), (reference, unfiltered)
    return [(one[:, 1:][real].numpy(), other[real].numpy()) for one, other in pairs]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", LOGPROBS), ("bfloat16", 1e-4)])
@pytest.mark.parametrize(
    "megatron", [{}, {"tensor_model_parallel_size": 2}, TP2_SP], ids=["one", "tp2", "tp2 sp"]
)
def test_logprobs_are_of_the_filtered_policy_and_of_the_whole_reference(
    ranks, megatron, precision, tolerance
):
    for found, reference in ranks(2 if megatron else 1).run(filtered_pass, megatron, precision):
        assert 5 < (found[0] == -float("inf")).sum() < len(found[0]) / 2
        assert found[0] == pytest.approx(found[1], abs=tolerance)
        assert reference[0] == pytest.approx(reference[1], abs=tolerance)


def gradients_of_a_step():
    """Each gradient's largest difference from that of plain log-probabilities, and the tokens outside."""
    from nemo_rl_mcore.losses import TokenOutputs

    worker, batch, loss_fn = filtering_worker(), tiny.grpo_batch(), tiny.grpo_loss()
    batch["prev_logprobs"] = worker.get_logprobs(data=batch)["logprobs"]
    worker.begin_train_step(loss_fn)
    worker.train_microbatch(batch)
    found = tiny.gradients(worker)
    worker.abort_train_step()
    worker.backend.zero_grad()
    (logprobs, entropy), (unfiltered, _) = (
        plain_outputs(worker, batch, filters) for filters in (FILTERS, {})
    )
    sums = loss_fn.sums(TokenOutputs(logprobs.float(), entropy.float(), unfiltered.float()), batch)
    sums.loss.backward()
    wanted = tiny.gradients(worker)
    outside = float(sums.metrics["num_tokens_outside_filters"].value)
    return {n: float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted}, outside


def test_gradients_are_those_of_plain_logprobs_at_every_parameter(ranks):
    differences, outside = ranks(1).run(gradients_of_a_step)[0]
    assert outside > 5
    assert max(differences.values()) < GRADIENTS, differences


def whole_and_split_step(megatron):
    """The largest difference of the parameters, the largest update, and both steps' tokens outside."""
    batch, loss_fn, after, outside = tiny.grpo_batch(), tiny.grpo_loss(), [], []
    for split in (False, True):
        worker = filtering_worker(megatron)
        before = tiny.parameters(worker)
        batch["prev_logprobs"] = worker.get_logprobs(data=batch)["logprobs"]
        if split:
            worker.begin_train_step(loss_fn)
            for start in (0, 2, 6):
                worker.train_microbatch(batch.slice(start, {0: 2, 2: 6, 6: 8}[start]))
            result = worker.finish_train_step()
        else:
            result = worker.train(batch, loss_fn)
        after.append(tiny.parameters(worker))
        outside.append(result["all_mb_metrics"]["num_tokens_outside_filters"])
    differences = [
        max(float((one[name] - other[name]).abs().max()) for name in one)
        for one, other in (after, (before, after[0]))
    ]
    return differences, outside


@pytest.mark.parametrize("megatron", [{}, TP2_SP], ids=["one", "tp2 sp"])
def test_the_split_step_equals_the_whole_one(ranks, megatron):
    for (difference, update), outside in ranks(2 if megatron else 1).run(whole_and_split_step, megatron):
        assert difference <= SPLIT_STEP < 1e-3 < update
        assert outside[0] == outside[1]
        assert outside[0][0] > 5
