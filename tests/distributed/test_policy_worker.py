"""One real rank: log-probabilities, the split step, abort, the reference policy, skipped steps."""

from itertools import accumulate

import pytest
import tiny
import torch
from refusals import refused

from nemo_rl_mcore.driver.algorithms.algorithm import join_results, train_metrics
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn, NLLLossFn
from nemo_rl_mcore.rank.train_step import EMPTY_STEP


def run(ranks, function, *args):
    return ranks(1).run(function, *args)[0]


def logprobs_in_bf16(fused):
    """Of a worker, and of Megatron's own path: no labels, so all logits."""
    worker = tiny.worker(
        tiny.policy_config(
            precision="bfloat16",
            generation={"max_new_tokens": 4, "temperature": 1.0},
            megatron={"use_fused_linear_logprobs": fused},
        )
    )
    batch, model = tiny.grpo_batch(rows=5), worker.backend.chunks[0]  # no multiple of the microbatch size
    found = worker.get_logprobs(data=batch)["logprobs"]
    assert (found.dtype, model.training) == (torch.float32, True)
    ids, length = batch["input_ids"], batch["input_ids"].shape[1]
    with torch.no_grad():
        causal = torch.ones(1, 1, length, length).triu(1).bool()
        logits = model(ids, torch.arange(length).expand(len(ids), -1), causal)
    wanted = logits.double().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    wanted = torch.nn.functional.pad(wanted, (1, 0))
    wanted[torch.arange(length) >= batch["input_lengths"].unsqueeze(1)] = 0.0
    return found.numpy(), wanted.numpy()


def test_bf16_logprobs_fused_and_unfused_agree(ranks):
    (fused, _), (unfused, wanted) = (run(ranks, logprobs_in_bf16, flag) for flag in (True, False))
    assert fused == pytest.approx(unfused, abs=2e-2)
    # The fused path keeps fp32 logits or rounds as the unfused does: never worse.
    assert abs(fused - wanted).max() <= 2 * max(abs(unfused - wanted).max(), 1e-2)


class ThisRank:
    """A worker group of one rank, in this process."""

    placement = None

    def __init__(self, worker):
        self.worker = worker

    def __call__(self, *_args, **_options):
        return self

    def run_all(self, method, *, per_rank_kwargs=(), answering=None, context="", **kwargs):
        return [getattr(self.worker, method)(**kwargs, **(per_rank_kwargs[0] if per_rank_kwargs else {}))]


def loops_of_nemo_rl(offload, precision):
    """A step of its synchronous loop and one of its single controller, which asks for log-probs between chunks."""
    config = tiny.policy_config(offload=offload, precision=precision)
    batch, loss_fn = tiny.grpo_batch(), tiny.grpo_loss()
    ranks = ThisRank(tiny.worker(config))
    policy = Policy(config, None, seed=42, group=ranks)
    policy.prepare_for_lp_inference()
    policy.get_logprobs(batch)
    policy.prepare_for_training()
    whole = policy.train(batch, loss_fn, False, 8, 2)
    policy.finish_training()
    weights = tiny.parameters(ranks.worker)
    policy = Policy(config, None, seed=42, group=ThisRank(tiny.worker(config)))
    policy.begin_train_step(loss_fn, 8, 2)
    for chunk in (batch.slice(0, 4), batch.slice(4, 8)):
        policy.prepare_for_lp_inference(keep_train_buffers=True)
        policy.get_logprobs(chunk)
        policy.prepare_for_training()
        policy.train_microbatch(chunk)
    split = policy.finish_train_step()
    evaluated = policy.train(batch, loss_fn, eval_mode=True)
    difference = tiny.largest_difference(weights, tiny.parameters(policy.workers.worker))
    return [
        {**found, "model_dtype": str(found["model_dtype"])} for found in (whole, split, evaluated)
    ], difference


@pytest.mark.parametrize(
    ("offload", "precision"), [("none", "float32"), ("grads_optimizer", "float32"), ("all", "bfloat16")]
)
def test_loops_of_nemo_rl_run_and_read_their_results(ranks, offload, precision):
    results, difference = run(ranks, loops_of_nemo_rl, offload, precision)
    for found in results:
        assert found["loss"].tolist() == found["global_loss"].tolist()
        assert (found["rank"], found["model_dtype"]) == (0, f"torch.{precision}")
        assert found["train_elapsed_seconds"] == found["elapsed"] > 0
        assert not {"moe_metrics", "mtp_metrics", "gpu_name"} & found.keys()
    assert results[0]["loss"].tolist() == results[1]["loss"].tolist()
    assert difference == 0.0


def logprobs_by_router_replay():
    worker, batch = tiny.worker(tiny.policy_config()), tiny.grpo_batch()
    with refused("no-router-replay", "get_logprobs", "require_router_replay", by=RefusedError):
        worker.get_logprobs(data=batch, require_router_replay=True)
    plain = worker.get_logprobs(data=batch)["logprobs"]
    return (plain == worker.get_logprobs(data=batch, require_router_replay=False)["logprobs"]).all().item()


def test_router_replay_is_refused_where_it_is_required(ranks):
    assert run(ranks, logprobs_by_router_replay)


def evaluated_in_parts(loss, parts):
    """The metrics of 14 rows, of which so many are evaluated at a time."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker = tiny.worker(tiny.policy_config())
    batch = tiny.grpo_batch(rows=14)
    loss_fn = {"nll": NLLLossFn(), "dpo": DPOLossFn({"sft_loss_weight": 0.1})}[loss]
    batch["sample_mask"] = (
        batch["sample_mask"].roll(-2 * (loss == "dpo")).reshape(7, 2).amin(1).repeat_interleave(2)
    )
    ranks, rank = parallel_groups.group("data").size(), parallel_groups.group("data").rank()
    results = []
    for first, rows in zip(accumulate([0, *parts]), parts, strict=False):
        part = batch.slice(first, first + rows).split(ranks, loss_fn.rows_per_sample)[rank]
        results.append(worker.train(part, loss_fn, eval_mode=True, mbs=2))
    metrics = train_metrics(join_results(results), "validation")
    return {name: value for name, value in metrics.items() if name.startswith("validation/")}


@pytest.mark.parametrize("loss", ["nll", "dpo"])
@pytest.mark.parametrize("number", [1, 2])
def test_rows_evaluated_in_parts_have_the_metrics_of_one_batch(ranks, number, loss):
    whole = ranks(number).run(evaluated_in_parts, loss, [14])
    assert whole[0]["validation/loss"] > 0
    for parts in ([8, 6], [2] * 7, [6, 6, 2]):
        for of_rank in ranks(number).run(evaluated_in_parts, loss, parts):
            assert of_rank == pytest.approx(whole[0], rel=1e-5)


def steps_of_which_one_is_empty(order):
    batches = {"full": tiny.grpo_batch(), "empty": tiny.grpo_batch(seed=1)}
    batches["empty"]["sample_mask"] = batches["empty"]["sample_mask"] * 0
    worker = tiny.worker(tiny.policy_config())
    data = tiny.BatchedDataDict.from_batches([batches[name] for name in order])
    together = worker.train(data, tiny.grpo_loss())
    alone = tiny.worker(tiny.policy_config()).train(batches["full"], tiny.grpo_loss())
    return together, alone


@pytest.mark.parametrize("order", [("full", "empty"), ("empty", "full")], ids=str)
def test_an_empty_step_among_others_is_reported_and_costs_nothing(ranks, order):
    together, alone = run(ranks, steps_of_which_one_is_empty, order)
    full, empty = order.index("full"), order.index("empty")
    assert together["skip_reasons"][full] is None
    assert together["skip_reasons"][empty] == EMPTY_STEP
    assert together["all_mb_metrics"].keys() == alone["all_mb_metrics"].keys()
    for name, (value,) in alone["all_mb_metrics"].items():
        assert together["all_mb_metrics"][name][full] == pytest.approx(value), name
    assert together["all_mb_metrics"]["probs_ratio_min"][empty] == float("inf")
