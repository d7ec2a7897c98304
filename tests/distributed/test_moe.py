"""Mixture-of-experts models: every layout, and the weight and the metrics of the load-balancing loss."""

import numpy as np
import pytest
import tiny
import torch
from tolerances import GENERATION, LOGPROBS, METRICS, REORDERED

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
EP2, CP2 = {"expert_model_parallel_size": 2}, {"context_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2, RECOMPUTED = {"pipeline_model_parallel_size": 2}, {"activation_checkpointing": True}
TWO_RANKS = {
    "dp2": {},
    "ep2": EP2,
    "tp2-sp": TP2_SP,
    "tp2-sp-ep2": TP2_SP | EP2,
    "pp2": PP2,
    "cp2": CP2,
    "cp2-ep2": CP2 | EP2,
    "ep2-recompute": EP2 | RECOMPUTED,
}


def steps_from(megatron, weights, fused, model):
    """Log-probabilities and two steps from given full weights: metrics, gradients and weights under global names."""
    from megatron.core import parallel_state

    keys = {"use_fused_linear_logprobs": fused}
    keys["fused_linear_logprobs_context_parallel"] = fused and "context_parallel_size" in megatron
    config = tiny.policy_config(model=EXPERTS | model, megatron=megatron | keys, max_grad_norm=0.0)
    worker = tiny.worker(config)
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    start = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    logprobs = [worker.get_logprobs(data=tiny.grpo_batch())["logprobs"].numpy() for _ in range(2)]
    loss_fn = tiny.grpo_loss(fused=fused)
    steps = [worker.train(tiny.shard(tiny.grpo_batch(seed=seed)), loss_fn) for seed in range(2)]
    end = {
        tiny.global_name(name, config): parameter.numpy()
        for name, parameter in tiny.parameters(worker).items()
    }
    metrics = [step["all_mb_metrics"] | {"norm": step["grad_norm"].tolist()} for step in steps]
    whole = parallel_state.get_tensor_model_parallel_world_size() == 1
    return start, logprobs, metrics, end if whole else {}, [step["moe_metrics"] for step in steps]


BALANCED = {"moe_aux_loss_coeff": 0.1}


@pytest.fixture(scope="module")
def single_rank(ranks):
    return ranks(1).run(steps_from, {}, None, False, BALANCED)[0]


@pytest.mark.smoke("tp2-sp-ep2")
@pytest.mark.quick_cases("tp2-sp-ep2", "pp2", "cp2-ep2", "ep2-recompute")
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_equal_one(ranks, single_rank, layout):
    weights, logprobs, metrics, end, balance = single_rank
    given = TWO_RANKS[layout], weights, True, BALANCED  # the reference is unfused
    for _, own_logprobs, own_metrics, own_end, own_balance in ranks(2).run(steps_from, *given):
        assert own_logprobs[0] == pytest.approx(logprobs[0], abs=2 * LOGPROBS)
        assert (own_logprobs[0] == own_logprobs[1]).all(), "a pass without gradients has no noise"
        for own, reference in zip(own_metrics, metrics, strict=True):
            assert own.keys() == reference.keys()
            for name in reference:
                assert own[name] == pytest.approx(reference[name], **METRICS), name
        for name, own in own_end.items():
            assert own == pytest.approx(end[name], abs=10 * REORDERED), name
        for own, reference in zip(own_balance, balance, strict=True):
            assert own == pytest.approx(reference, rel=1e-4)


def initial_weights(megatron):
    config = tiny.policy_config(model=EXPERTS, megatron=megatron)
    worker = tiny.worker(config)
    return {tiny.global_name(name, config): value.numpy() for name, value in tiny.parameters(worker).items()}


def test_spread_experts_start_different_and_all_else_equal(ranks):
    first, second = ranks(2).run(initial_weights, {"expert_model_parallel_size": 2})
    shared = first.keys() & second.keys()
    assert not any("local_experts" in name for name in shared)
    for name in shared:
        assert (first[name] == second[name]).all(), name
    experts = [weight for weights in (first, second) for name, weight in weights.items() if "fc1" in name]
    assert len(experts) == 8
    assert all(abs(a - b).max() > 1e-3 for i, a in enumerate(experts) for b in experts[:i])


COEFFICIENT = 0.5


def router_gradients(coefficient, kind, token_level, mbs, chunk_rows):
    """A step of chunks: the last router's gradient, its inputs and weight, and the batch."""
    model = EXPERTS | {"moe_aux_loss_coeff": coefficient, "moe_router_load_balancing_type": kind}
    worker = tiny.worker(tiny.policy_config(model=model, max_grad_norm=0.0))
    *_, last = (part for name, part in worker.backend.chunks[0].named_modules() if name.endswith("router"))
    router, seen = last.weight.detach().clone(), []
    last.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach().clone()))
    batch, first = tiny.grpo_batch(), 0
    worker.begin_train_step(tiny.grpo_loss(token_level_loss=token_level), mbs=mbs)
    for rows in chunk_rows:
        worker.train_microbatch(batch.slice(first, first + rows))
        first += rows
    worker.finish_train_step()
    return last.weight.main_grad.clone(), seen, router, batch


def balancing_gradient_and_oracle(kind, *step):
    """What the load-balancing loss adds to the last router's gradient of a step, and the oracle's."""
    without, *_ = router_gradients(0.0, kind, *step)
    found, *saw = router_gradients(COEFFICIENT, kind, *step)
    return (found - without).numpy(), weighted_mean_gradient(kind, *saw, *step)


def weighted_mean_gradient(kind, hiddens, router, batch, token_level, mbs, chunk_rows):
    """The gradient of the coefficient times the mean of microbatches' losses, weighted by their part of the loss."""
    weight = router.double().requires_grad_()
    tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum(1)
    parts = tokens if token_level else batch["sample_mask"]
    total = 0.0
    for hidden_SBH, rows in zip(hiddens, rows_of_microbatches(mbs, chunk_rows), strict=True):
        scores_SBE = (hidden_SBH.double() @ weight.T).softmax(-1)
        groups = [scores_SBE[: batch["input_lengths"][row], place] for place, row in enumerate(rows)]
        loss = switch_loss(groups if kind == "seq_aux_loss" else [torch.cat(groups)])
        total = total + COEFFICIENT * loss * float(parts[rows].sum() / parts.sum())
    total.backward()
    return weight.grad.numpy()


def rows_of_microbatches(mbs, chunk_rows):
    first = 0
    for rows in chunk_rows:
        yield from (list(range(i, min(i + mbs, first + rows))) for i in range(first, first + rows, mbs))
        first += rows


def switch_loss(groups, topk=2):
    """Experts * sum of (share of the tokens sent to it) * (its mean score), averaged over groups of tokens."""
    count = sum(len(scores) for scores in groups) / len(groups)
    losses = []
    for scores in groups:
        sent = torch.nn.functional.one_hot(scores.topk(topk, dim=1).indices, scores.shape[1]).sum((0, 1))
        losses.append(scores.shape[1] * (sent / (topk * count) * scores.sum(0) / count).sum())
    return torch.stack(losses).mean()


# Microbatch size and rows of the chunks; (3, 5) by two fills microbatches up with empty rows.
STEPS = [("aux_loss", 8, (8,)), ("aux_loss", 1, (8,)), ("aux_loss", 2, (3, 5)), ("seq_aux_loss", 2, (3, 5))]


@pytest.mark.each_value
@pytest.mark.parametrize("token_level", [True, False], ids=["token-level", "sequence-level"])
@pytest.mark.parametrize(("kind", "mbs", "chunk_rows"), STEPS, ids=str)
def test_the_router_gets_the_coefficient_times_the_mean_loss(ranks, kind, token_level, mbs, chunk_rows):
    step = token_level, mbs, chunk_rows
    found, wanted = ranks(1).run(balancing_gradient_and_oracle, kind, *step)[0]
    assert abs(wanted).max() > 1e-3
    assert found == pytest.approx(wanted, abs=2e-6)


def biases_after_a_step(megatron):
    """The experts' biases that a step leaves, and where the tokens of its batch went in the first pass [S, B, E]."""
    model = EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    worker = tiny.worker(tiny.policy_config(model=model, megatron=megatron))
    batch = tiny.grpo_batch()
    routers = [part for name, part in worker.backend.chunks[0].named_modules() if name.endswith("router")]
    sent = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: sent.append(output[1].clone()))
        for router in routers
    ]
    reference = worker.get_reference_policy_logprobs(data=batch, micro_batch_size=8)["reference_logprobs"]
    for hook in hooks:
        hook.remove()
    worker.train(tiny.shard(batch), tiny.grpo_loss())
    again = worker.get_reference_policy_logprobs(data=batch, micro_batch_size=8)["reference_logprobs"]
    assert torch.equal(reference, again), "the reference keeps the biases of the start"
    biases = [router.expert_bias.numpy().copy() for router in routers]
    return (
        biases,
        [routing_map.view(-1, 8, 4).numpy() for routing_map in sent],
        batch["input_lengths"].numpy(),
    )


def test_padding_moves_no_bias_of_an_expert(ranks):
    biases, sent, lengths = ranks(1).run(biases_after_a_step, {})[0]
    real_SB = np.arange(12)[:, None] < lengths
    directions = []
    for bias, routing_map in zip(biases, sent, strict=True):
        counts, padded = routing_map[real_SB].sum(0), routing_map.sum((0, 1))
        assert bias == pytest.approx(1e-3 * np.sign(counts.mean() - counts))
        directions.append(np.sign(padded.mean() - padded) != np.sign(counts.mean() - counts))
    assert np.any(directions), "with the padding some bias would have moved another way"


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", "recompute"])
def test_the_biases_of_experts_follow_all_ranks(ranks, layout):
    wanted, _, _ = ranks(1).run(biases_after_a_step, {})[0]
    pool = ranks(1 if layout == "recompute" else 2)
    for biases, _, _ in pool.run(
        biases_after_a_step, TWO_RANKS.get(layout, {"activation_checkpointing": True})
    ):
        for bias, other in zip(biases, wanted, strict=True):
            assert (bias == other).all()


def balance_of_a_step(evaluates):
    worker = tiny.worker(tiny.policy_config(model=EXPERTS | {"moe_aux_loss_coeff": 0.1}))
    worker.begin_train_step(tiny.grpo_loss())
    worker.train_microbatch(tiny.grpo_batch())
    if evaluates:
        evaluated = worker.train(tiny.grpo_batch(seed=3), tiny.grpo_loss(), eval_mode=True)
        assert evaluated["moe_metrics"] == {}
    return worker.finish_train_step()["moe_metrics"]


def test_an_evaluation_in_an_open_step_leaves_the_steps_own_metrics(ranks):
    plain, with_evaluation = (ranks(1).run(balance_of_a_step, flag)[0] for flag in (False, True))
    assert plain == with_evaluation != {}


def generated_and_confirmed(lengths_of_rank, stop_ids):
    """The largest difference between what generation says of its tokens and what `get_logprobs` says."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker = tiny.worker(tiny.policy_config(model=EXPERTS, megatron={"expert_model_parallel_size": 2}))
    rank = parallel_groups.group("data").rank()
    lengths = torch.tensor(lengths_of_rank[rank])
    rows = torch.arange(len(lengths)) + 10 * rank
    prompts = (rows.unsqueeze(1) * 7 + torch.arange(4)) % tiny.VOCABULARY
    answers = worker.generate(
        data=tiny.BatchedDataDict(
            input_ids=prompts, input_lengths=lengths, prompt_index=rows, sample_index=rows
        ),
        step=1,
        stop_ids=stop_ids,
    )
    whole = torch.zeros(len(lengths), 8, dtype=torch.long)
    for row, (length, new) in enumerate(zip(lengths, answers["lengths"], strict=True)):
        whole[row, :length] = prompts[row, :length]
        whole[row, length : length + new] = answers["tokens"][row, :new]
    confirmed = worker.get_logprobs(
        data=tiny.BatchedDataDict(input_ids=whole, input_lengths=lengths + answers["lengths"])
    )["logprobs"]
    differences = [
        (confirmed[row, length : length + new] - answers["logprobs"][row, :new]).abs().max()
        for row, (length, new) in enumerate(zip(lengths, answers["lengths"], strict=True))
    ]
    return answers["lengths"].tolist(), float(max(differences))


@pytest.mark.parametrize("stop_ids", [[], [*range(12)]], ids=["to the limit", "with stops"])
def test_ranks_that_share_experts_generate_prompts_of_any_lengths(ranks, stop_ids):
    """They need different numbers of batches and of steps, and meet in every forward pass."""
    found = ranks(2).run(generated_and_confirmed, [[4, 4], [2, 3, 4]], stop_ids)
    for lengths, difference in found:
        assert difference < GENERATION
        assert (set(lengths) == {4}) == (not stop_ids)


# Metrics are of real rows: neither a chunk without rows nor filled-up microbatches change them


MOE_AGAIN = RECOMPUTED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FILLED_LAYOUTS = {
    "one": (1, {}),
    "recompute": (1, RECOMPUTED),
    "ep2": (2, EP2),
    "tp2-sp": (2, TP2_SP),
    "pp2-recompute": (2, PP2 | RECOMPUTED),
    "pp2-recompute-moe": (2, PP2 | MOE_AGAIN),
}
ALL, EMPTY = (0, 8), (0, 0)


def balance_of_steps(megatron, kind, steps):
    """The metric, and every gradient, of steps that move no weight; each is (microbatch size, rows of the chunks)."""
    model = EXPERTS | BALANCED | {"moe_router_load_balancing_type": kind}
    megatron = megatron | {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}}
    worker = tiny.worker(tiny.policy_config(model=model, megatron=megatron, max_grad_norm=0.0))
    batch, found = tiny.grpo_batch(), []
    for mbs, chunks in steps:
        worker.begin_train_step(tiny.grpo_loss(), mbs=mbs, gbs=8)
        for first, end in chunks:
            rows = batch.slice(first, end)
            worker.train_microbatch(tiny.shard(rows) if rows.size else rows)
        (metric,) = worker.finish_train_step()["moe_metrics"].values()
        found.append((metric, {name: value.numpy() for name, value in tiny.gradients(worker).items()}))
    return found


# A step of microbatches that are filled up, and each of its microbatches as a step without filling.
FILLED = [(5, [ALL]), (5, [(0, 5)]), (3, [(5, 8)])]
FILLED_ON_TWO = [(3, [(0, 6), (6, 8)]), (3, [(0, 6)]), (1, [(6, 8)])]


@pytest.mark.quick_cases(
    "one-seq_aux_loss", "recompute-seq_aux_loss", "pp2-recompute-moe-seq_aux_loss", "ep2-aux_loss"
)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("layout", FILLED_LAYOUTS)
def test_filling_and_empty_chunks_do_not_count(ranks, layout, kind):
    world_size, megatron = FILLED_LAYOUTS[layout]
    steps = [(4, [ALL]), (4, [ALL, EMPTY]), *(FILLED_ON_TWO if layout == "ep2" else FILLED)]
    for found in ranks(world_size).run(balance_of_steps, megatron, kind, steps):
        (whole, gradients), (with_empty, same_gradients), (filled, _), *alone = found
        assert with_empty == whole > 0.5
        assert all((same_gradients[name] == gradients[name]).all() for name in gradients)
        assert filled == pytest.approx(sum(metric for metric, _ in alone) / 2, rel=1e-6)
