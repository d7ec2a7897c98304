"""One real rank: log-probabilities, the split step, abort, the reference policy, skipped steps."""

from itertools import accumulate

import pytest
from tolerances import LOGPROBS, REORDERED


def run(ranks, function, *args):
    return ranks(1).run(function, *args)[0]


def logprobs_against_plain_forward(temperature, fused, precision):
    import tiny
    import torch
    from megatron.core.models.gpt import GPTModel

    config = tiny.policy_config(
        precision=precision,
        generation={"max_new_tokens": 4, "temperature": temperature},
        megatron={"use_fused_linear_logprobs": fused},
    )
    worker = tiny.worker(config)
    batch = tiny.grpo_batch(rows=5)  # no multiple of the microbatch size
    found = worker.get_logprobs(data=batch)["logprobs"]
    model = worker.backend.chunks[0]
    assert any(isinstance(module, GPTModel) for module in model.modules())
    rows, length = batch["input_ids"].shape
    with torch.no_grad():
        # Megatron's own path: no labels, so all logits.
        logits = model(
            batch["input_ids"],
            torch.arange(length).expand(rows, -1),
            torch.ones(1, 1, length, length).triu(1).bool(),
        )
    every = (logits.double() / temperature).log_softmax(-1)
    wanted = every[:, :-1].gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    wanted = torch.nn.functional.pad(wanted, (1, 0))
    wanted[torch.arange(length) >= batch["input_lengths"].unsqueeze(1)] = 0.0
    return found.dtype == torch.float32, found.numpy(), wanted.numpy(), worker.backend.chunks[0].training


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_megatrons_own_forward(ranks, temperature, fused):
    is_fp32, found, wanted, training = run(
        ranks, logprobs_against_plain_forward, temperature, fused, "float32"
    )
    assert is_fp32
    assert training, "the model is back in training mode"
    assert (found[:, 0] == 0).all()
    assert (found[wanted == 0] == 0).all()
    assert found == pytest.approx(wanted, abs=LOGPROBS)


def test_bf16_logprobs_fused_and_unfused_agree(ranks):
    _, fused, _, _ = run(ranks, logprobs_against_plain_forward, 1.0, True, "bfloat16")
    _, unfused, wanted, _ = run(ranks, logprobs_against_plain_forward, 1.0, False, "bfloat16")
    assert fused == pytest.approx(unfused, abs=2e-2)
    # The fused path keeps fp32 logits or rounds as the unfused does: never worse.
    assert abs(fused - wanted).max() <= 2 * max(abs(unfused - wanted).max(), 1e-2)


def split_against_whole(chunk_rows, fused):
    import tiny

    config = tiny.policy_config(megatron={"use_fused_linear_logprobs": fused})
    whole = tiny.worker(config)
    loss_fn = tiny.grpo_loss(fused=fused)
    results = [whole.train(tiny.grpo_batch(seed=step), loss_fn) for step in range(3)]
    weights = tiny.parameters(whole)
    split = tiny.worker(config)
    for step in range(3):
        batch = tiny.grpo_batch(seed=step)
        split.begin_train_step(loss_fn)
        start = 0
        for rows in chunk_rows:
            split.train_microbatch(batch.slice(start, start + rows))
            split.get_logprobs(data=batch)
            start += rows
        with_reference = split.get_reference_policy_logprobs(data=batch)
        assert with_reference["reference_logprobs"].shape == batch["input_ids"].shape
        found = split.finish_train_step()
        assert found.keys() == results[step].keys()
        assert found["global_loss"].tolist() == pytest.approx(results[step]["global_loss"].tolist(), rel=1e-5)
        assert found["grad_norm"].tolist() == pytest.approx(results[step]["grad_norm"].tolist(), rel=1e-5)
        for name, values in results[step]["all_mb_metrics"].items():
            assert found["all_mb_metrics"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    return tiny.largest_difference(weights, tiny.parameters(split))


@pytest.mark.each_value
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("chunk_rows", "tolerance"),
    [
        # Whole microbatches of two rows: the same sums in the same order, so bit for bit.
        ([2, 6], 0.0),
        # Rows meet other rows in their microbatches: rounding differs, and three Adam steps at 1e-2 carry it on.
        # Rows 1 and 2 have no valid token, so the last case has an empty chunk.
        ([1, 2, 1, 3, 1], REORDERED),
    ],
    ids=str,
)
def test_split_step_equals_train(ranks, chunk_rows, tolerance, fused):
    assert run(ranks, split_against_whole, chunk_rows, fused) <= tolerance


class ThisRank:
    """A worker group of one rank, in this process."""

    def __init__(self, worker):
        self.worker = worker

    def __call__(self, *_args, **_options):
        return self

    def run_all(self, method, *, per_rank_kwargs=(), answering=None, context="", **kwargs):
        return [getattr(self.worker, method)(**kwargs, **(per_rank_kwargs[0] if per_rank_kwargs else {}))]


def loops_of_nemo_rl(offload, precision):
    """A step of its synchronous loop and one of its single controller, which asks for log-probs between chunks."""
    import tiny

    from nemo_rl_mcore.driver.policy import Policy

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
    difference = tiny.largest_difference(weights, tiny.parameters(policy._workers.worker))
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
    import tiny
    from refusals import refused

    from nemo_rl_mcore.errors import RefusedError

    worker, batch = tiny.worker(tiny.policy_config()), tiny.grpo_batch()
    with refused("no-router-replay", "get_logprobs", "require_router_replay", by=RefusedError):
        worker.get_logprobs(data=batch, require_router_replay=True)
    plain = worker.get_logprobs(data=batch)["logprobs"]
    return (plain == worker.get_logprobs(data=batch, require_router_replay=False)["logprobs"]).all().item()


def test_router_replay_is_refused_where_it_is_required(ranks):
    assert run(ranks, logprobs_by_router_replay)


def step_after_abort(fail):
    import tiny
    import torch
    from injection import InjectedError, Point, failing

    config = tiny.policy_config()
    loss_fn = tiny.grpo_loss()
    clean = tiny.worker(config)
    clean.train(tiny.grpo_batch(seed=1), loss_fn)
    wanted = tiny.parameters(clean)
    worker = tiny.worker(config)
    before = tiny.parameters(worker), worker.backend.scheduler.num_steps, torch.get_rng_state()
    worker.begin_train_step(loss_fn)
    worker.train_microbatch(tiny.grpo_batch(seed=7))
    torch.rand(3)
    if fail:
        half_way = Point("forward_backward", "after the first backward pass")
        with failing(worker, half_way), pytest.raises(InjectedError):
            worker.train_microbatch(tiny.grpo_batch(seed=8))
        with pytest.raises(RuntimeError, match="abort_train_step"):
            worker.finish_train_step()
    worker.abort_train_step()
    worker.abort_train_step()  # nothing to do when idle
    config_functions = worker.backend.config
    assert config_functions.finalize_model_grads_func is not None
    assert tiny.largest_difference(before[0], tiny.parameters(worker)) == 0.0
    assert worker.backend.scheduler.num_steps == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    worker.train(tiny.grpo_batch(seed=1), loss_fn)
    return tiny.largest_difference(wanted, tiny.parameters(worker))


@pytest.mark.parametrize("fail", [False, True], ids=["open", "failed"])
def test_abort_leaves_no_trace(ranks, fail):
    assert run(ranks, step_after_abort, fail) == 0.0


def reference_swap_that_fails():
    import tiny
    import torch

    worker = tiny.worker(tiny.policy_config())
    batch = tiny.grpo_batch()
    at_start = worker.get_logprobs(data=batch)["logprobs"]
    worker.train(batch, tiny.grpo_loss())
    trained = tiny.parameters(worker)
    reference = worker.get_reference_policy_logprobs(data=batch)["reference_logprobs"]
    policy = worker.get_logprobs(data=batch)["logprobs"]

    def fails(*_args):
        raise InterruptedError

    handle = worker.backend.chunks[0].register_forward_pre_hook(fails)
    with pytest.raises(InterruptedError):
        worker.get_reference_policy_logprobs(data=batch)
    handle.remove()
    restored = tiny.largest_difference(trained, tiny.parameters(worker)) == 0.0
    return (
        torch.equal(reference, at_start),
        not torch.equal(policy, at_start),
        restored,
        torch.is_grad_enabled(),
    )


def test_reference_policy_is_the_start_and_the_swap_survives_an_exception(ranks):
    assert run(ranks, reference_swap_that_fails) == (True, True, True, True)


def steps_that_must_not_update():
    import tiny

    worker = tiny.worker(tiny.policy_config())
    start, samples = tiny.parameters(worker), worker.backend.scheduler.num_steps
    nan = tiny.grpo_batch()
    nan["advantages"][0] = float("nan")
    empty = tiny.grpo_batch()
    empty["sample_mask"] = empty["sample_mask"] * 0
    outcomes = []
    for batch in (nan, empty):
        result = worker.train(batch, tiny.grpo_loss())
        outcomes.append((result["update_successful"], result["skip_reasons"]))
    unchanged = tiny.largest_difference(start, tiny.parameters(worker)) == 0.0
    unchanged &= worker.backend.scheduler.num_steps == samples
    good = worker.train(tiny.grpo_batch(), tiny.grpo_loss())
    return outcomes, unchanged, good["update_successful"], worker.backend.scheduler.num_steps


def test_a_step_that_is_not_finite_or_empty_is_skipped_and_reported(ranks):
    from nemo_rl_mcore.rank.train_step import EMPTY_STEP

    outcomes, unchanged, recovered, samples = run(ranks, steps_that_must_not_update)
    assert outcomes[0] == (False, ["the loss is nan"])
    assert outcomes[1] == (False, [EMPTY_STEP])
    assert unchanged
    assert recovered
    assert samples == 8


def step_with_a_token_that_had_no_probability(previous, fused):
    import tiny
    import torch

    worker = tiny.worker(tiny.policy_config(megatron={"use_fused_linear_logprobs": fused}))
    batch = tiny.grpo_batch()
    row, column = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)).nonzero()[0].tolist()
    batch["prev_logprobs"][row, column] = previous
    batch["advantages"][row, column] = 1.0
    result = worker.train(batch, tiny.grpo_loss(fused=fused))
    gradients = all(bool(gradient.isfinite().all()) for gradient in tiny.gradients(worker).values())
    return result["skip_reasons"], gradients, torch.isfinite(result["grad_norm"]).all().item()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_one_clipped_token_does_not_cost_the_step(ranks, fused):
    assert run(ranks, step_with_a_token_that_had_no_probability, -200.0, fused) == ([None], True, True)


def evaluated_in_parts(loss, parts):
    """The metrics of 14 rows, of which so many are evaluated at a time."""
    import tiny

    from nemo_rl_mcore.driver.algorithms.step_metrics import join_results, train_metrics
    from nemo_rl_mcore.losses import DPOLossFn, NLLLossFn
    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker = tiny.worker(tiny.policy_config())
    batch = tiny.grpo_batch(rows=14)
    loss_fn = {"nll": NLLLossFn(), "dpo": DPOLossFn({"sft_loss_weight": 0.1})}[loss]
    batch["sample_mask"] = (
        batch["sample_mask"].roll(-2 * (loss == "dpo")).reshape(7, 2).amin(1).repeat_interleave(2)
    )
    ranks, rank = parallel_groups.data_parallel_size(), parallel_groups.data_parallel_rank()
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


def bf16_training():
    import tiny

    worker = tiny.worker(
        tiny.policy_config(precision="bfloat16", megatron={"use_fused_linear_logprobs": True})
    )
    losses = [
        float(
            worker.train(tiny.grpo_batch(), tiny.grpo_loss(fused=True, reference_policy_kl_penalty=0.0))[
                "global_loss"
            ]
        )
        for _ in range(5)
    ]
    return losses, {str(p.dtype) for p in tiny.parameters(worker).values()}


def test_bf16_trains_with_fp32_main_parameters(ranks):
    losses, dtypes = run(ranks, bf16_training)
    assert dtypes == {"torch.bfloat16"}
    assert losses[-1] < losses[0] - 0.01


def steps_of_which_one_is_empty(order):
    import tiny

    batches = {"full": tiny.grpo_batch(), "empty": tiny.grpo_batch(seed=1)}
    batches["empty"]["sample_mask"] = batches["empty"]["sample_mask"] * 0
    worker = tiny.worker(tiny.policy_config())
    data = tiny.BatchedDataDict.from_batches([batches[name] for name in order])
    together = worker.train(data, tiny.grpo_loss())
    alone = tiny.worker(tiny.policy_config()).train(batches["full"], tiny.grpo_loss())
    return together, alone


@pytest.mark.parametrize("order", [("full", "empty"), ("empty", "full")], ids=str)
def test_an_empty_step_among_others_is_reported_and_costs_nothing(ranks, order):
    from nemo_rl_mcore.rank.train_step import EMPTY_STEP

    together, alone = run(ranks, steps_of_which_one_is_empty, order)
    full, empty = order.index("full"), order.index("empty")
    assert together["skip_reasons"][full] is None
    assert together["skip_reasons"][empty] == EMPTY_STEP
    assert together["all_mb_metrics"].keys() == alone["all_mb_metrics"].keys()
    for name, (value,) in alone["all_mb_metrics"].items():
        assert together["all_mb_metrics"][name][full] == pytest.approx(value), name
    assert together["all_mb_metrics"]["probs_ratio_min"][empty] == float("inf")


def chunk_without_rows():
    import tiny

    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker = tiny.worker(tiny.policy_config())
    worker.begin_train_step(tiny.grpo_loss())
    mine = tiny.shard(tiny.grpo_batch())
    worker.train_microbatch(mine if parallel_groups.data_parallel_rank() == 0 else mine.slice(0, 0))
    result = worker.finish_train_step()
    return result["update_successful"], result["all_mb_metrics"]["global_valid_seqs"]


def test_a_rank_that_has_no_rows_of_a_chunk_adds_it_all_the_same(ranks):
    assert ranks(2).run(chunk_without_rows) == [(True, [3.0])] * 2
