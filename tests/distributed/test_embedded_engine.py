"""The generator in a process of its own against the contract of engines, and against the ranks that train."""

import asyncio

import pytest
import tiny
import torch
from engine_contract import keeps_to_the_contract, load

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.engine_generation import as_batch, as_requests
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


def a_refit_with_a_fault(fault, transport, verify):
    """What the second refit of an engine says, and the version that it then holds."""
    engine = open_engine()
    sender = {"ray": MessageSender, "shared_memory": SharedMemorySender}[transport]
    stale, sent = weights_of(engine, 1.0), sent_with(fault, weights_of(engine, 2.0))
    asyncio.run(load(engine, stale, 0, sender=sender))
    filling, (chunk,) = engine._backend.filling, engine._backend.chunks
    engine._backend.filling = lambda: FaultyFilling(filling(), fault, dict(stale), chunk)
    told = None if verify else dict.fromkeys(name for name, _ in sent)
    try:
        asyncio.run(load(engine, sent, 1, sender=sender, sent=told))
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
        ((message, held),) = ranks(1).run(a_refit_with_a_fault, fault, transport, True)
        assert expected in message, fault
        assert held is None
    ((message, held),) = ranks(1).run(a_refit_with_a_fault, "", transport, True)
    assert (message, held) == ("", 1)


def test_without_the_comparison_only_names_and_shapes_are_told(ranks):
    for fault in UNEQUAL:
        assert ranks(1).run(a_refit_with_a_fault, fault, "shared_memory", False) == [("", 1)], fault
    for fault, expected in WRONG.items():
        ((message, held),) = ranks(1).run(a_refit_with_a_fault, fault, "shared_memory", False)
        assert expected in message
        assert held is None


def layers_held(stages):
    engine = open_engine({"num_layers": 5}, {"pipeline_model_parallel_size": 2, **stages})
    names = [name for name, _ in engine._backend.full_tensors()]
    return {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}


def test_an_engine_holds_all_layers_whatever_the_stages_of_the_ranks(ranks):
    [held] = ranks(1).run(layers_held, {"num_layers_in_first_pipeline_stage": 2})
    assert held == {*range(5)}
