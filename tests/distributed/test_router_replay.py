"""Router replay: routes recorded in one pass and replayed in others, in every layout."""

import asyncio

import numpy as np
import pytest
import tiny
import torch
from engine_contract import load
from test_moe import EXPERTS, TWO_RANKS
from tolerances import LOGPROBS, REORDERED

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import NO_ROUTE, ROUTED_EXPERTS
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import Request, Sampling
from nemo_rl_mcore.rank import rendezvous

DENSE_FIRST = EXPERTS | {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS = TWO_RANKS | {"pp2-recompute": PP2 | {"activation_checkpointing": True}}
BATCHING = {
    "rows": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 30}},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 30}},
}


def replaying(megatron=(), batching="rows", **keys):
    keys = {"model": DENSE_FIRST, "max_grad_norm": 0.0, "router_replay": {"enabled": True}} | keys
    return tiny.policy_config(megatron=dict(megatron), **BATCHING[batching], **keys)


def with_routes(batch, missing=True, layers=3):
    """The batch with experts drawn at random; some tokens have none."""
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(*batch["input_ids"].shape, layers, 4, generator=generator)
    batch[ROUTED_EXPERTS] = draws.topk(2).indices.to(torch.int8)
    if missing:
        batch[ROUTED_EXPERTS][3] = NO_ROUTE
        batch[ROUTED_EXPERTS][torch.arange(batch.size), batch["input_lengths"] - 1] = NO_ROUTE
    return batch


def of_tokens(routes, batch):
    """The sets of experts of all tokens that are not padding."""
    real = torch.arange(routes.shape[1]) < batch["input_lengths"].unsqueeze(1)
    return routes[real].sort(-1).values


def record(worker, batch):
    """A pass's routes, also where it replays those of the batch."""
    return of_tokens(worker.backend.logprobs_and_routes(batch, 4)[1], batch)


def replays_what_it_records(policy):
    """A worker that replays its own routes bit for bit, and given ones where they belong."""
    worker, batch = tiny.worker(policy), tiny.grpo_batch()
    recorded = worker.get_logprobs(data=batch)
    given = with_routes(batch.copy(), missing=False, layers=recorded[ROUTED_EXPERTS].shape[2])
    batch[ROUTED_EXPERTS] = recorded[ROUTED_EXPERTS]
    replayed = worker.get_logprobs(data=batch)["logprobs"]
    assert torch.equal(replayed, recorded["logprobs"])
    assert not torch.equal(worker.get_logprobs(data=given)["logprobs"], replayed)
    assert torch.equal(record(worker, given), of_tokens(given[ROUTED_EXPERTS], given))
    return worker


def layout_replays(megatron, batching, weights):
    """Recorded routes, log-probabilities of given ones, and the weights after steps that replay them."""
    policy = replaying(megatron, batching)
    worker = replays_what_it_records(policy)
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    start = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    batch = tiny.grpo_batch()
    own = of_tokens(worker.get_logprobs(data=batch)[ROUTED_EXPERTS], batch).numpy()
    logprobs = worker.get_logprobs(data=with_routes(batch))["logprobs"].numpy()
    for seed in range(2):
        dealt = tiny.dealt(policy, with_routes(tiny.grpo_batch(seed=seed)))
        worker.train(dealt, tiny.grpo_loss(), mbs=1)
    end = {tiny.global_name(name, policy): value.numpy() for name, value in tiny.parameters(worker).items()}
    return start, own, logprobs, end


@pytest.fixture(scope="module")
def single_rank(ranks):
    return ranks(1).run(layout_replays, {}, "rows", None)[0]


@pytest.mark.parametrize(
    ("layout", "batching"),
    [
        *((layout, "rows") for layout in LAYOUTS),
        *(("cp2-ep2", "packed"), ("tp2-sp-ep2", "packed"), ("pp2", "dynamic")),
    ],
)
def test_two_ranks_record_and_replay_like_one(ranks, single_rank, layout, batching):
    weights, own, logprobs, end = single_rank
    for _, own_routes, own_logprobs, own_end in ranks(2).run(
        layout_replays, LAYOUTS[layout], batching, weights
    ):
        assert (own_routes == own).all()
        assert own_logprobs == pytest.approx(logprobs, abs=2 * LOGPROBS)
        for name, value in own_end.items():
            if value.shape == end[name].shape:  # not a part of a tensor-parallel rank
                assert value == pytest.approx(end[name], abs=10 * REORDERED), name


def virtual_stages_and_hybrids():
    replays_what_it_records(replaying(PP2 | {"virtual_pipeline_model_parallel_size": 2}))
    replays_what_it_records(replaying(PP2 | {"model_class": "hybrid"}, model=EXPERTS))


def test_virtual_stages_and_hybrid_models_find_their_layers(ranks):
    ranks(2).run(virtual_stages_and_hybrids)


def replayed_layer(moved):
    """A layer's output under recorded routes, by the layer and by the formula; moved: its router has changed since."""
    worker, batch = tiny.worker(replaying(model=EXPERTS)), tiny.grpo_batch()
    layer = worker.backend.chunks[0].module.decoder.layers[0].mlp
    batch[ROUTED_EXPERTS] = worker.get_logprobs(data=batch)[ROUTED_EXPERTS]
    if moved:
        layer.router.weight.data.neg_()
    recorded = of_tokens(batch[ROUTED_EXPERTS], batch)
    kept = [torch.equal(record(worker, rows), recorded) for rows in (batch, batch.without(ROUTED_EXPERTS))]
    seen = {}
    layer.register_forward_hook(
        lambda _layer, inputs, output: seen.update(x=inputs[0].clone(), y=output[0].clone())
    )
    worker.get_logprobs(data=batch, micro_batch_size=8)
    real = torch.arange(12).unsqueeze(1) < batch["input_lengths"]
    x, chosen = seen["x"][real].double(), batch[ROUTED_EXPERTS][:, :, 0].transpose(0, 1)[real].long()
    shares = (x @ layer.router.weight.double().T).gather(1, chosen).softmax(1)
    wanted = torch.zeros_like(x)
    for place in range(2):
        for number, expert in enumerate(layer.experts.local_experts):
            to_it = chosen[:, place] == number
            gate, up = (x[to_it] @ expert.linear_fc1.weight.double().T).chunk(2, dim=1)
            found = (torch.nn.functional.silu(gate) * up) @ expert.linear_fc2.weight.double().T
            wanted[to_it] += found * shares[to_it, place].unsqueeze(1)
    return seen["y"][real].detach().numpy(), wanted.detach().numpy(), kept


@pytest.mark.parametrize("moved", [False, True])
def test_a_changed_router_weighs_the_experts_that_were_chosen_before(ranks, moved):
    found, wanted, kept = ranks(1).run(replayed_layer, moved)[0]
    assert found == pytest.approx(wanted, abs=1e-6)
    assert kept == [True, not moved]


def ties_broken_anew(replay):
    """How far log-probabilities move as the last bits of weights break each tie of two experts the other way."""
    worker, batch = tiny.worker(replaying(model=EXPERTS)), tiny.grpo_batch()

    def break_ties(factor):
        for layer in worker.backend.chunks[0].module.decoder.layers:
            layer.mlp.router.weight.data[2] = layer.mlp.router.weight[1] * factor
        return worker.get_logprobs(data=batch)

    before = break_ties(1 + 2**-21)
    if replay:
        batch[ROUTED_EXPERTS] = before[ROUTED_EXPERTS]
    return float((break_ties(1 - 2**-21)["logprobs"] - before["logprobs"]).abs().max())


def test_no_rounding_of_weights_moves_a_token_to_other_experts(ranks):
    assert ranks(1).run(ties_broken_anew, True)[0] < LOGPROBS
    assert ranks(1).run(ties_broken_anew, False)[0] > 1000 * LOGPROBS


def whole_split_and_aborted(megatron):
    """Weights after `train`, after the split step, and after a step that follows an aborted one; and ratios."""
    loss_fn, found = tiny.grpo_loss(), []
    for way in ("whole", "split", "after an abort"):
        policy = replaying(megatron, train_micro_batch_size=2, logprob_batch_size=2)
        worker = tiny.worker(policy)
        batch = tiny.grpo_batch()
        for column, value in worker.get_logprobs(data=batch).items():
            batch["prev_logprobs" if column == "logprobs" else column] = value
        if way == "after an abort":
            worker.begin_train_step(loss_fn)
            worker.train_microbatch(tiny.shard(with_routes(tiny.grpo_batch())))
            worker.abort_train_step()
            again = worker.get_logprobs(data=batch.without(ROUTED_EXPERTS))
            assert all(
                torch.equal(again[name], batch[column])
                for name, column in (("logprobs", "prev_logprobs"), (ROUTED_EXPERTS, ROUTED_EXPERTS))
            )
        own = tiny.shard(batch)
        if way == "split":
            worker.begin_train_step(loss_fn)
            worker.train_microbatch(own.slice(0, 4))
            worker.train_microbatch(own.slice(4, own.size)) if own.size > 4 else None
            result = worker.finish_train_step()
        else:
            result = worker.train(own, loss_fn)
        metrics = result["all_mb_metrics"]
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == [1.0]
        found.append({name: value.numpy() for name, value in tiny.parameters(worker).items()})
    return found


@pytest.mark.parametrize("layout", ["tp2-sp-ep2", "pp2", "cp2-ep2"])
def test_training_repeats_the_pass_before_bit_for_bit(ranks, layout):
    for whole, split, after in ranks(2).run(whole_split_and_aborted, LAYOUTS[layout]):
        for name in whole:
            assert (whole[name] == split[name]).all(), name
            assert (whole[name] == after[name]).all(), name


def routes_of_decoding_and_of_a_pass():
    """An engine's routes of prompts and responses, and those that a pass over the same tokens records."""
    policy = replaying(
        model=EXPERTS | {"qk_layernorm": True, "num_query_groups": 2},
        generation={"max_new_tokens": 5, "temperature": 0.7, "colocated": {"enabled": False}},
    )
    prompts = [[5, 6, 7], [8], [5, 6, 7], [9, 4], *([number, 3, 9, 9, 1, 2] for number in range(1, 5))]

    tiny.leave()
    rendezvous.leave()
    engine = EmbeddedEngine(EmbeddedSettings(policy))
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]

    async def answer():
        await load(engine, [(name, one * 2) for name, one in engine._backend.full_tensors()], 0)
        return await engine.generate(requests, Sampling(5, 0.7, stop_ids=tuple(range(3, 9))), 0)

    found = []
    for prompt, response in zip(prompts, asyncio.run(answer()), strict=True):
        ids = torch.tensor([[*prompt, *response.tokens]])
        batch = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([ids.shape[1]]))
        recorded = engine._backend.logprobs_and_routes(batch, 1)[1][0, :-1]
        found.append((response.routes, recorded.numpy(), len(response.tokens)))
    return found


def test_an_engine_returns_the_routes_that_a_pass_records(ranks):
    found = ranks(1).run(routes_of_decoding_and_of_a_pass)[0]
    for engine, recorded, _ in found:
        assert engine.dtype == recorded.dtype == np.int8
        assert (np.sort(engine) == np.sort(recorded)).all()
    assert len({tokens for *_, tokens in found}) > 1, "rows of one batch end one after the other"
