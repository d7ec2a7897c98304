"""A model that is never trained: it says what the trained one says, and has neither gradient buffers nor optimizer."""

import pytest
import tiny
import torch

from nemo_rl_mcore.models import missing_family

TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
FUSED = {"use_fused_linear_logprobs": True}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


def build(model, megatron, **options):
    policy = {name: options.pop(name) for name in ("precision",) if name in options}
    # As a frozen second model gets it: its own rules, not all of those of a policy, are met before.
    config = tiny.policy_config(model=model, **policy)
    layout = config.megatron_cfg.model_copy(update=megatron)
    return tiny.worker(config.model_copy(update={"megatron_cfg": layout}), **options)


def said_by(worker):
    """All that can be asked of a model that is not trained."""
    batch = tiny.grpo_batch()
    if worker.role.value == "value":
        return {"values": worker.get_values(data=batch)["values"]}
    prompts = tiny.BatchedDataDict(
        input_ids=batch["input_ids"][:4, :5],
        input_lengths=torch.tensor([5, 3, 4, 1]),
        prompt_index=torch.arange(4),
        sample_index=torch.arange(4),
    )
    said = {"logprobs": worker.get_logprobs(data=batch)["logprobs"]}
    said |= worker.get_topk_logits(data=batch, k=5)
    said |= worker.generate(data=prompts, step=3, stop_ids=[1])
    if missing_family(worker.policy.model) is None:
        sent = {name: tensor.clone() for name, tensor in worker.backend.full_tensors()}
        assert sent.keys() == worker.prepare_refit_info().keys()
        said |= sent
    return said


def trained_and_frozen(model, megatron, options):
    """What the two differ in."""
    trained = said_by(build(model, megatron, **options))
    worker = build(model, megatron, trained=False, **options)
    frozen = said_by(worker)
    assert trained.keys() == frozen.keys()
    parameters = [parameter for chunk in worker.backend.chunks for parameter in chunk.parameters()]
    assert parameters
    assert not any(hasattr(parameter, "main_grad") for parameter in parameters)
    assert all(parameter.grad is None for parameter in parameters)
    assert not hasattr(worker.backend, "optimizer")
    return [name for name in trained if not torch.equal(trained[name], frozen[name])]


@pytest.mark.parametrize(
    ("world_size", "model", "megatron", "options"),
    [
        (1, {"mtp_num_layers": 1}, FUSED, {"precision": "bfloat16"}),
        (1, {}, {}, {"role": "value", "precision": "bfloat16"}),
        (2, {}, TP2_SP | FUSED, {}),
        (2, TIED, PP2 | FUSED, {}),
        (2, {"num_layers": 4}, VPP, {}),
        (2, EXPERTS, EP2 | FUSED, {}),
    ],
)
def test_it_says_what_the_trained_model_says(ranks, world_size, model, megatron, options):
    assert ranks(world_size).run(trained_and_frozen, model, megatron, options) == [[]] * world_size
