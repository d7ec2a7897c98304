"""Weights and models that training leaves as they are: to the bit, without gradients or optimizer, on every layout."""

import pytest
import tiny
import torch

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1,
    "qk_layernorm": True,
}  # fmt: skip
BIASED = {"add_qkv_bias": True}
TIED = {"tie_word_embeddings": True}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
PLAIN = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
RECOMPUTED = {"activation_checkpointing": True}

EMBEDDING = {"freeze": ("model.embed_tokens.weight",)}
LOWER = {"freeze": ("model.embed_tokens.weight", "model.layers.0.*")}
UPPER = {"freeze": ("lm_head.weight", "model.norm.weight", "model.layers.1.*")}
ATTENTION = {"freeze": ("*.self_attn.*",)}
HEAD = {"freeze": ("lm_head.weight", "model.norm.weight")}
OF_EXPERTS = {"freeze": ("*.mlp.experts.*", "*.mlp.gate.weight")}
ROUTERS = {"freeze_moe_router": True}


def steps(freeze, model, megatron, policy, folder):
    """Weights before and after two steps, gradients of the first, and what a checkpoint of it brings back."""
    keys = PLAIN | megatron | freeze
    worker = tiny.worker(tiny.policy_config(model=model, megatron=keys, max_grad_norm=0.0, **policy))
    start = tiny.parameters(worker)
    worker.train(tiny.shard(tiny.grpo_batch()), tiny.grpo_loss())
    gradients = tiny.gradients(worker)
    worker.train(tiny.shard(tiny.grpo_batch(seed=1)), tiny.grpo_loss())
    worker.save_checkpoint(folder)
    end = tiny.parameters(worker)
    worker.train(tiny.shard(tiny.grpo_batch(seed=2)), tiny.grpo_loss())
    third = tiny.parameters(worker)
    worker.load_checkpoint(folder, weights_only=False)
    again = tiny.parameters(worker)
    assert all(torch.equal(again[name], value) for name, value in end.items())
    worker.train(tiny.shard(tiny.grpo_batch(seed=2)), tiny.grpo_loss())
    again = tiny.parameters(worker)
    assert all(torch.equal(again[name], value) for name, value in third.items())
    frozen = {
        f"{stage}.{name}"
        for stage, chunk in enumerate(worker.backend.chunks)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    }
    parts = (
        {name: value.float().numpy() for name, value in part.items()} for part in (start, end, gradients)
    )
    return (*parts, frozen)


@pytest.mark.parametrize(
    ("freeze", "model", "megatron"),
    [
        pytest.param(HEAD, {}, {"use_fused_linear_logprobs": True}, id="head-fused"),
        pytest.param(EMBEDDING, {}, RECOMPUTED, id="embedding-recomputed"),
        pytest.param(ATTENTION, BIASED, TP2_SP, id="attention-tp2-sp"),
        pytest.param(EMBEDDING, TIED, PP2, id="tied-pp2"),
        pytest.param(UPPER, {}, PP2, id="upper-pp2"),
        pytest.param(LOWER, {"num_layers": 4}, VPP, id="lower-vpp"),
        pytest.param(OF_EXPERTS, EXPERTS, EP2, id="experts-ep2"),
        pytest.param(LOWER, {}, {**PP2, "model_class": "hybrid"}, id="lower-pp2-hybrid"),
        pytest.param(ROUTERS, EXPERTS, EP2 | {"context_parallel_size": 2}, id="routers-cp2-ep2"),
    ],
)
def test_frozen_weights_stay_to_the_bit_and_all_else_has_the_same_gradients(
    ranks, tmp_path, freeze, model, megatron
):
    alone = megatron.keys() <= {"use_fused_linear_logprobs", "activation_checkpointing"}
    pool = ranks(1 if alone else 2)
    trained = pool.run(steps, {}, model, megatron, {}, str(tmp_path / "trained"))
    frozen = pool.run(steps, freeze, model, megatron, {}, str(tmp_path / "frozen"))
    assert any(names for *_, names in frozen)
    for (_, _, wanted, none), (start, end, gradients, names) in zip(trained, frozen, strict=True):
        assert not none
        assert gradients.keys() == wanted.keys() - names
        for name, gradient in gradients.items():
            assert (gradient == wanted[name]).all(), name
        for name in start:
            assert (start[name] == end[name]).all() == (name in names), name


def biases_after_a_step(freeze):
    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    model = EXPERTS | biased | {"moe_aux_loss_coeff": 0.0}
    worker = tiny.worker(tiny.policy_config(model=model, megatron={"freeze": freeze}))
    worker.train(tiny.grpo_batch(), tiny.grpo_loss())
    buffers = worker.backend.chunks[0].named_buffers()
    return [bool(bias.any()) for name, bias in buffers if name.endswith("expert_bias")]


@pytest.mark.parametrize(
    ("freeze", "moved"),
    [((), [True, True]), (("model.layers.0.*",), [False, True]), (("*_correction_bias",), [False, False])],
    ids=["none", "a-layer", "biases"],
)
def test_a_frozen_bias_of_experts_is_not_moved(ranks, freeze, moved):
    assert ranks(1).run(biases_after_a_step, freeze) == [moved]


def sharded_steps_in_bf16(freeze, model, folder):
    worker = tiny.worker(tiny.policy_config(precision="bfloat16", megatron=freeze, model=model))
    start = tiny.parameters(worker)
    for seed in range(2):
        worker.train(tiny.shard(tiny.grpo_batch(seed=seed)), tiny.grpo_loss())
    worker.save_checkpoint(folder)
    worker.load_checkpoint(folder)
    end = tiny.parameters(worker)
    frozen = {
        name for name, parameter in worker.backend.chunks[0].named_parameters() if not parameter.requires_grad
    }
    return {name.partition(".")[2]: bool((value == end[name]).all()) for name, value in start.items()}, frozen


@pytest.mark.parametrize(("freeze", "model"), [(LOWER, {}), (ROUTERS, EXPERTS)], ids=["lower", "routers"])
def test_a_sharded_optimizer_in_bf16_has_no_part_of_them(ranks, tmp_path, freeze, model):
    for unchanged, frozen in ranks(2).run(sharded_steps_in_bf16, freeze, model, str(tmp_path / "frozen")):
        assert frozen
        assert {name for name, same in unchanged.items() if same} == frozen


def kept_by_a_model_that_is_never_trained():
    """Whether it has gradients of any kind, and an optimizer."""
    backend = tiny.worker(tiny.policy_config(), trained=False).backend
    parameters = [parameter for chunk in backend.chunks for parameter in chunk.parameters()]
    assert parameters
    gradients = [hasattr(one, "main_grad") or one.grad is not None for one in parameters]
    return any(gradients), hasattr(backend, "optimizer")


def test_a_model_that_is_never_trained_keeps_neither_gradients_nor_an_optimizer(ranks):
    assert ranks(1).run(kept_by_a_model_that_is_never_trained) == [(False, False)]
