"""Passes that are asked about trained tokens alone say of these what passes over all tokens say, and nothing else."""

import pytest
import tiny
import tolerances
import torch

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}
PACKED = "fused_linear_logprobs_packed"
BATCHING = {
    "fixed": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 36, "train_mb_tokens": 36}},
    "packed": {"sequence_packing": {"enabled": True, "logprob_mb_tokens": 36, "train_mb_tokens": 36}},
}


def both_ways(megatron, fused, sections):
    """By the name of a result: over all tokens, of the trained ones; then the mask; and how many rows had logits."""
    keys = {"use_fused_linear_logprobs": fused, PACKED: fused and "sequence_packing" in sections}
    config = tiny.policy_config(megatron=megatron | keys, **sections)
    worker = tiny.worker(config)
    data = tiny.grpo_batch(seed=5)
    # Observations: what the model did not say, in the middle of what it said.
    data["token_mask"][:, 5:7] = 0
    found = {}
    for read, more in (
        (worker.get_logprobs, {}),
        (worker.get_reference_policy_logprobs, {}),
        (worker.get_topk_logits, {"k": 3}),
    ):
        every = read(data=data, micro_batch_size=4, **more)
        marked = read(data=data, micro_batch_size=4, trained_only=True, **more)
        found |= {name: (every[name].numpy(), marked[name].numpy()) for name in every}
    with pytest.raises(ValueError, match="token_mask"):
        worker.get_logprobs(data=data.without("token_mask"), trained_only=True)
    assert torch.equal(data["token_mask"][:, 5:7], torch.zeros(8, 2))
    return found, data["token_mask"].bool().numpy()


@pytest.mark.each_value
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trained_tokens_have_what_all_tokens_have(ranks, layout, batching, fused):
    count, megatron = LAYOUTS[layout]
    for found, mask in ranks(count).run(both_ways, megatron, fused, BATCHING[batching]):
        for name, (every, marked) in found.items():
            # A result of top-k stands at the position before its token, a log-probability at the token.
            shown = mask if name.endswith("logprobs") else shifted(mask)
            assert marked[shown] == pytest.approx(every[shown], abs=tolerances.LOGPROBS), name
            assert (every[~shown] != 0).any(), name
            assert (marked[~shown] == 0).all(), name


def shifted(mask):
    left = mask.copy()
    left[:, :-1], left[:, -1] = mask[:, 1:], False
    return left


def logits_of(fused):
    """Positions whose logits an unfused training pass makes."""
    from megatron.core.utils import unwrap_model

    worker = tiny.worker(tiny.policy_config(megatron={"use_fused_linear_logprobs": fused}))
    shapes = []
    layer = unwrap_model(worker.backend.chunks[0]).output_layer
    layer.register_forward_hook(lambda _module, inputs, _output: shapes.append(inputs[0].shape[:2].numel()))
    data = tiny.grpo_batch()
    worker.train(data, tiny.grpo_loss(fused=fused), mbs=8)
    marked = int((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    return shapes, marked, data["input_ids"].numel()


def test_a_training_pass_has_logits_at_trained_tokens_alone(ranks):
    ((shapes, marked, every),) = ranks(1).run(logits_of, False)
    assert shapes == [marked]
    assert marked < every
