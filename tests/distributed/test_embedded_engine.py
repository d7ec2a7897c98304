"""The generator in a process of its own against the contract of engines, and against the ranks that train."""

import asyncio

import pytest
import tiny
import torch
from engine_contract import keeps_to_the_contract, load
from refusals import assert_holds

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.engine_generation import as_batch, as_requests
from nemo_rl_mcore.driver.algorithms.engine_comparison import BOUNDS, EnginesDifferError, compare
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import Request, Sampling
from nemo_rl_mcore.ops.sampling import sample_keys
from nemo_rl_mcore.rank import rendezvous
from nemo_rl_mcore.rank.refit.transports import MessageSender, SharedMemorySender


def open_engine(model=None, megatron=None, **generation):
    tiny.leave()
    rendezvous.leave()
    reread = generation.pop("reread_after_refit", False)
    policy = tiny.policy_config(
        model=model, megatron=megatron, generation={"max_new_tokens": 8, **generation}
    )
    return EmbeddedEngine(EmbeddedSettings(policy, reread_after_refit=reread))


def weights_of(engine, factor):
    return [(name, tensor * factor) for name, tensor in engine._backend.full_tensors()]


def the_contract():
    engine = open_engine(max_new_tokens=200)
    requests = [Request([5, 6, 7], 11), Request([8, 2, 4], 12), Request([5, 6, 9], 13)]
    old, new = weights_of(engine, 2.0), weights_of(engine, 3.0)
    asyncio.run(keeps_to_the_contract(engine, old, new, requests, overlaps=True, sleeps=False))


def test_the_engine_keeps_to_the_contract(ranks):
    ranks(1).run(the_contract)


def answers_of_both():
    """Tokens, log-probabilities and ends, of ranks that train and of an engine that was sent their weights."""
    data = BatchedDataDict(
        input_ids=torch.tensor([[5, 6, 7], [8, 0, 0], [5, 6, 7], [9, 4, 0]]),
        input_lengths=torch.tensor([3, 1, 3, 2]),
        prompt_index=torch.tensor([0, 1, 0, 2]),
        sample_index=torch.tensor([0, 0, 1, 0]),
        turn_index=torch.tensor([0, 2, 1, 0]),
        stop_strings=[("bc",), (), ("e", "d"), ()],
    )
    generation = {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "stop_strings": ["a"]}
    policy = tiny.policy_config(generation={"max_new_tokens": 8, **generation})
    trainer = tiny.worker(policy, seed=7)
    asked = trainer.generate(data=data, step=4, stop_ids=[3])
    tensors = [(name, tensor.clone()) for name, tensor in trainer.backend.full_tensors()]
    trainer.shutdown()

    async def ask():
        engine = open_engine(**generation)
        await load(engine, tensors, 0)
        keys = sample_keys(7, 4, data["prompt_index"], data["sample_index"], data["turn_index"])
        requests = as_requests(BatchedDataDict(data, seeds=keys))
        sampling = Sampling(8, 1.3, 20, 0.95, stop_ids=(3,), stop_strings=("a",))
        whole = as_batch(await engine.generate(requests, sampling, 0), 8)
        # One by one, and all at a time: a group each.
        groups = await asyncio.gather(*(engine.generate([one], sampling, 0) for one in requests))
        return whole, as_batch([row for group in groups for row in group], 8)

    found = [asked, *asyncio.run(ask())]
    return [
        {key: rows[key].tolist() for key in ("tokens", "logprobs", "lengths", "finished", "digests")}
        for rows in found
    ]


def test_the_engine_answers_as_the_ranks_do(ranks):
    """To the bit, alone and among others: a row depends on its prompt, its key and the weights."""
    ((asked, together, apart),) = ranks(1).run(answers_of_both)
    assert together == asked
    assert apart["tokens"] == asked["tokens"]
    assert apart["lengths"] == asked["lengths"]
    assert 0 < sum(asked["finished"]) < 4


class FaultyFilling:
    """A `WeightFilling` after which the model does not hold what came."""

    def __init__(self, filling, fault, stale, chunk):
        self.filling, self.fault, self.stale = filling, fault, stale
        self.parameters = dict(chunk.named_parameters())

    def take(self, name, tensor):
        if self.fault == "skipped" and name == "model.norm.weight":
            return
        self.filling.take(name, self.stale[name] if self.fault == "stale" and "up_proj" in name else tensor)

    def missing(self):
        with torch.no_grad():
            if self.fault == "flipped":
                self.of("layers.0.mlp.linear_fc2.weight").view(torch.int32)[3, 5] ^= 1
            elif self.fault == "half":
                rows = self.of("layers.1.self_attention.linear_qkv.weight")
                rows[: len(rows) // 2] = 0
        return () if self.fault == "skipped" else self.filling.missing()

    def of(self, end):
        return next(parameter for name, parameter in self.parameters.items() if name.endswith(end))


def sent_with(fault, tensors):
    """The tensors of a sender that has another model."""
    match fault:
        case "a part of a weight":
            return [pair for pair in tensors if pair[0] != "model.layers.1.self_attn.k_proj.weight"]
        case "another model's tensor":
            return [*tensors, ("model.layers.7.mlp.up_proj.weight", torch.zeros(2))]
        case "another shape":
            changed = {"model.norm.weight": torch.zeros(31)}
            return [(name, changed.get(name, tensor)) for name, tensor in tensors]
        case _:
            return tensors


def a_refit_with_a_fault(fault, transport):
    """What the second refit of an engine says, and the version that it then holds."""
    engine = open_engine()
    sender = {"ray": MessageSender, "shared_memory": SharedMemorySender}[transport]
    stale, sent = weights_of(engine, 1.0), sent_with(fault, weights_of(engine, 2.0))
    asyncio.run(load(engine, stale, 0, sender=sender))
    filling, (chunk,) = engine._backend.filling, engine._backend.chunks
    engine._backend.filling = lambda: FaultyFilling(filling(), fault, dict(stale), chunk)
    try:
        asyncio.run(load(engine, sent, 1, sender=sender))
    except (RuntimeError, ValueError) as error:
        return str(error), engine.weights.version
    return "", engine.weights.version


UNEQUAL = {
    "flipped": "1 not as they were sent: model.layers.0.mlp.down_proj.weight",
    "skipped": "1 not as they were sent: model.norm.weight",
    "stale": "2 not as they were sent: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight",
    "half": "not as they were sent: model.layers.1.self_attn.q_proj.weight",
}
WRONG = {
    "a part of a weight": "1 without new weights: model.layers.1.self_attn.k_proj.weight",
    "another model's tensor": "the model has no tensor model.layers.7.mlp.up_proj.weight",
    "another shape": "model.norm.weight has the shape (31,), and the architecture gives it (32,)",
}


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
def test_weights_that_are_not_as_they_were_sent_are_named(ranks, transport):
    for fault, expected in (UNEQUAL | WRONG).items():
        ((message, held),) = ranks(1).run(a_refit_with_a_fault, fault, transport)
        assert expected in message, fault
        assert held is None
    ((message, held),) = ranks(1).run(a_refit_with_a_fault, "", transport)
    assert (message, held) == ("", 1)


def layers_held(stages):
    engine = open_engine({"num_layers": 5}, {"pipeline_model_parallel_size": 2, **stages})
    names = [name for name, _ in engine._backend.full_tensors()]
    return {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}


def test_an_engine_holds_all_layers_whatever_the_stages_of_the_ranks(ranks):
    [held] = ranks(1).run(layers_held, {"num_layers_in_first_pipeline_stage": 2})
    assert held == {*range(5)}


# Over the whole vocabulary, and faults that digests miss


PROMPTS = [[5, 6, 7], [8], [5, 6, 9, 2, 2, 11, 30, 4, 17, 23, 1, 12], [31, 0]]


def trained(policy, temperature):
    """Named tensors of ranks that train, and what they tell of each prompt."""
    trainer = tiny.worker(policy, seed=7, temperature=temperature)
    told = {}
    for prompt in PROMPTS:
        ids = [*prompt, prompt[-1]]
        data = BatchedDataDict(input_ids=torch.tensor([ids]), input_lengths=torch.tensor([len(ids)]))
        told[tuple(ids)] = trainer.get_topk_logits(data=data, k=tiny.VOCABULARY)
    tensors = [(name, tensor.clone()) for name, tensor in trainer.backend.full_tensors()]
    trainer.shutdown()
    return tensors, told


class Told:
    """A `Policy` that has been asked before: one process holds one model."""

    def __init__(self, told):
        self.told = told

    def get_topk_logits(self, data, k):
        return self.told[tuple(data["input_ids"][0].tolist())]


class Engines:
    """`ComparedEngines`: one in this process."""

    def __init__(self, engine):
        self.engine = engine

    def next_logprobs(self, prompts, temperature):
        return [asyncio.run(self.engine.next_logprobs(prompts, temperature))]


def alter_a_layer(engine):
    [chunk] = engine._backend.chunks
    [weight] = [
        parameter
        for name, parameter in chunk.named_parameters()
        if name.endswith("layers.1.mlp.linear_fc2.weight")
    ]
    with torch.no_grad():
        weight.mul_(1.01)


def engine_answers(engine):
    requests = [Request(prompt, row) for row, prompt in enumerate(PROMPTS)]
    return asyncio.run(engine.generate(requests, Sampling(3), 0))


def compared(
    precision="float32",
    engine_precision=None,
    temperature=0.7,
    trained_at=0.7,
    common=None,
    model=None,
    altered=False,
):
    """What is found between ranks and an engine that took their weights; model: what the engine makes of them."""
    tensors, told = trained(tiny.policy_config(precision=precision, model=common), trained_at)
    tiny.leave()
    rendezvous.leave()
    policy = tiny.policy_config(precision=engine_precision or precision, model=(common or {}) | (model or {}))
    engine = EmbeddedEngine(EmbeddedSettings(policy))
    if engine_precision is not None:  # as a sender that knows of it casts
        tensors = [(name, tensor.to(getattr(torch, engine_precision))) for name, tensor in tensors]
    asyncio.run(load(engine, tensors, 0, bucket_bytes=1 << 20))
    if altered:
        alter_a_layer(engine)
    noise, before = torch.get_rng_state(), engine_answers(engine)
    found = compare(Told(told), Engines(engine), PROMPTS, vocabulary=tiny.VOCABULARY, temperature=temperature)
    assert torch.equal(torch.get_rng_state(), noise), "a comparison draws nothing"
    assert engine_answers(engine) == before, "nor does what is answered depend on it"
    return found


def found_in_float32(keys):
    """What a comparison finds, and the complaint it would end a run with."""
    found = compared(**keys)
    try:
        found.require(BOUNDS["float32"])
    except EnginesDifferError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 1.0, "trained_at": 1.0},
        {"common": {"qk_layernorm": True, "tie_word_embeddings": True}},
        {"precision": "bfloat16"},
    ],
    ids=["temperature", "plain", "family", "bfloat16"],
)
def test_the_engine_computes_what_the_ranks_do(ranks, keys):
    [(found, complaint)] = ranks(1).run(found_in_float32, keys)
    assert complaint == ""
    assert (found.rows, found.vocabulary) == (4, 32)
    assert 0 < found.largest < 1e-5
    assert 0 <= found.kl < 1e-6


FAULTS = {
    "rotary base": {"model": {"rotary_base": 500000.0}},
    "epsilon": {"model": {"layernorm_epsilon": 1e-4}},
    "temperature of training": {"trained_at": 1.0},
    "a layer after the digest": {"altered": True},
    "number format": {"engine_precision": "bfloat16"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_digests_of_equal_weights_do_not_show_is_found(ranks, fault):
    [(found, complaint)] = ranks(1).run(found_in_float32, FAULTS[fault])
    assert found.largest > 1e-3
    parts = (
        "engine 0 ",
        f"row {found.row} ",
        len(PROMPTS[found.row]),
        f"token {found.token} ",
        f"{found.largest:.3g}",
    )
    assert_holds(complaint, *parts, "0.001")
    if fault == "rotary base":
        assert found.row != 1, "a prompt of one token has no distances"
