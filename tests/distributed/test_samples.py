"""A sample of several rows stays whole: DPO under every batching and layout, against a computation by hand."""

import pytest
import tiny
import torch
from refusals import refused
from test_microbatching import assert_metrics, by_tokens
from tolerances import REORDERED

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn, NLLLossFn

LAYOUTS = {
    "one-rank": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


WAYS = {
    "rows-1": {"train_micro_batch_size": 1},
    "rows-3": {"train_micro_batch_size": 3},
    "dynamic": by_tokens("dynamic_batching", None),
    "dynamic-30": by_tokens("dynamic_batching", 30),
    "dynamic-below-a-pair": by_tokens("dynamic_batching", 13),
    "packing": by_tokens("sequence_packing", None),
    "packing-39": by_tokens("sequence_packing", 39),
    "packing-below-a-pair": by_tokens("sequence_packing", 16),
}
FUSED = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_packed": True}
WAYS |= {f"fused-{name}": WAYS[name] | {"megatron": FUSED} for name in ("packing-39", "packing-below-a-pair")}
LENGTHS = [13, 12, 13, 4, 12, 12, 6, 7]
BETA = 1.0


def pairs(seed=0):
    """Four pairs of uneven rows; of the last pair the rejected row is masked, which its chosen row overrules."""
    batch = tiny.grpo_batch(rows=8, length=13, seed=seed)
    lengths = torch.tensor(LENGTHS)
    real = torch.arange(13) < lengths.unsqueeze(1)
    batch["input_lengths"] = lengths
    batch["input_ids"] = batch["input_ids"].clamp(min=1) * real
    batch["token_mask"] = (real & (torch.arange(13) >= 2)).float()
    batch["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 0])
    return batch


def config(way, megatron):
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, "adam_eps": 1e-3, "use_distributed_optimizer": False}
    sections = {"train_micro_batch_size": 2} | way
    megatron = megatron | sections.pop("megatron", {})
    return tiny.policy_config(
        megatron={"optimizer": optimizer, "scheduler": {"lr_warmup_iters": 4}} | megatron,
        train_global_batch_size=4,  # pairs
        max_total_sequence_length=13,
        **sections,
    )


def steps(way, megatron):
    """One step by train and one in two chunks: metrics, weights; with the loss and the accuracy by hand before each."""
    given = config(way, megatron)
    worker, loss_fn = tiny.worker(given), DPOLossFn({"reference_policy_kl_penalty": BETA})
    by_hand = [by_formula(worker, pairs())]
    results = [worker.train(tiny.dealt(given, pairs(), 2), loss_fn)]
    by_hand.append(by_formula(worker, pairs(1)))
    worker.begin_train_step(loss_fn)
    for rows in ((0, 2), (2, 8)):
        worker.train_microbatch(tiny.dealt(given, pairs(1).slice(*rows), 2))
    results.append(worker.finish_train_step())
    return (
        by_hand,
        [step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in results],
        {name: value.numpy() for name, value in tiny.parameters(worker).items()},
        worker.backend.scheduler.num_steps,
    )


def by_formula(worker, batch):
    """(loss, accuracy) from the log-probabilities that the worker gives: conventions' sums over chosen rows."""
    logprobs = worker.get_logprobs(data=batch)["logprobs"].double()[:, 1:]
    reference = batch["reference_policy_logprobs"].double()[:, :-1]
    rewards = ((logprobs - reference) * batch["token_mask"][:, 1:]).sum(1)
    chosen, rejected, kept = rewards[::2], rewards[1::2], batch["sample_mask"][::2]
    loss = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))
    count = batch["sample_mask"].sum() / 2
    return float((loss * kept).sum() / count), float(((chosen > rejected) * kept).sum() / count)


@pytest.fixture(scope="module")
def reference(ranks):
    known = {}

    def of(layout):
        if layout not in known:
            world_size, megatron = LAYOUTS[layout]
            known[layout] = ranks(world_size).run(steps, {"train_micro_batch_size": 4}, megatron)
        return known[layout]

    return of


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("layout", "way"),
    [("one-rank", way) for way in WAYS]
    + [
        (layout, way)
        for layout in ("dp2", "tp2-sp", "pp2")
        for way in ("rows-1", "dynamic-30", "packing-39", "fused-packing-39")
    ],
)
def test_pairs_stay_whole_in_every_microbatch(ranks, reference, layout, way):
    world_size, megatron = LAYOUTS[layout]
    for found, wanted in zip(
        ranks(world_size).run(steps, WAYS[way], megatron), reference(layout), strict=True
    ):
        by_hand, metrics, weights, samples = found
        for (loss, accuracy), step in zip(by_hand, metrics, strict=True):
            assert step["loss"][0] == pytest.approx(loss, rel=1e-5)
            assert step["accuracy"][0] == pytest.approx(accuracy, abs=1e-6)
        for step, whole in zip(metrics, wanted[1], strict=True):
            assert_metrics(step, whole)
        for name, weight in wanted[2].items():
            assert weights[name] == pytest.approx(weight, abs=REORDERED), name
        assert samples == 8  # two steps of four pairs


def learning_rates():
    """Of DPO and of a loss of single rows, over the same recipe."""
    found = []
    for loss_fn, rows in ((DPOLossFn({}), 8), (NLLLossFn(), 4)):
        worker = tiny.worker(config({}, {}))
        batch = pairs().slice(0, rows)
        found.append([worker.train(batch, loss_fn)["all_mb_metrics"]["lr"][0] for _ in range(6)])
    return found


def test_the_schedule_of_pairs_counts_optimizer_steps(ranks):
    of_pairs, of_rows = ranks(1).run(learning_rates)[0]
    assert of_pairs == of_rows
    assert of_pairs == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


def refusals():
    worker, loss_fn = tiny.worker(config({}, {})), DPOLossFn({})
    codes = []
    for rows, sizes in ((4, {"gbs": 3}), (4, {"gbs": 4, "mbs": 1}), (6, {"gbs": 4})):
        with pytest.raises(RefusedError) as caught:
            worker.train(pairs().slice(0, rows), loss_fn, **sizes)
        codes.append(caught.value.code)
    whole = worker.train(pairs(), loss_fn)
    again = tiny.worker(config({}, {}))
    again.begin_train_step(loss_fn)
    again.train_microbatch(pairs().slice(0, 4))
    with refused("batch", "3 rows", 2):
        again.train_microbatch(pairs().slice(4, 7))
    again.train_microbatch(pairs().slice(4, 8))
    streamed = again.finish_train_step()
    return codes, float(whole["global_loss"]), float(streamed["global_loss"])


def test_half_a_pair_is_refused_and_leaves_an_open_step_open(ranks):
    codes, whole, streamed = ranks(1).run(refusals)[0]
    assert codes == ["rows-per-sample", "rows-per-sample", "rows-per-step"]
    assert streamed == pytest.approx(whole, rel=1e-6)


def prediction_scale():
    """The scale of a prediction layer's loss over four pairs, and what it is to be."""
    worker, loss_fn, batch = (
        tiny.worker(tiny.policy_config(model={"mtp_num_layers": 1})),
        DPOLossFn({}),
        pairs(),
    )
    forward = worker.backend.forward
    (microbatch,) = forward.batching.microbatches(batch, 8, loss_fn.rows_per_sample)
    kept = batch["sample_mask"].view(-1, 2).amax(1).repeat_interleave(2)
    predicted = (batch["token_mask"][:, 1:] * kept[:, None]).sum()
    return forward.auxiliary.terms(microbatch, loss_fn).prediction, float(
        batch["sample_mask"].sum() / predicted
    )


def test_prediction_layers_count_the_tokens_of_whole_pairs(ranks):
    found, wanted = ranks(1).run(prediction_scale)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
