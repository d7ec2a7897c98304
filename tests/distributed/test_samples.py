"""A sample of several rows stays whole: DPO's loss is that of its formula, and half a pair is refused."""

import pytest
import tiny
import torch
from refusals import refused

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn

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
