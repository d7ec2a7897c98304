"""The embedded engine against the ranks that train, over the whole vocabulary, and faults that digests miss."""

import asyncio

import pytest
import tiny
import torch
from engine_contract import load
from refusals import assert_holds

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.engine_comparison import BOUNDS, EnginesDifferError, compare
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import Request, Sampling
from nemo_rl_mcore.rank import rendezvous

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
