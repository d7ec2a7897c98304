"""Fused kernels and parts that are computed again give the gradients of the plain model, and do what they are for."""

from contextlib import contextmanager

import pytest
import tiny
import torch
from tolerances import GRADIENTS, LOGPROBS

from nemo_rl_mcore.tools.check.plan import activation_bytes

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
MODELS = {"dense": {}, "experts": EXPERTS}
FUSED = {"bias_activation_fusion": True}


def again(*parts):
    return {
        "activation_checkpointing": True,
        "recompute_granularity": "selective",
        "recompute_modules": [*parts],
    }


CASES = {
    "dense-fused": ("dense", FUSED),
    "experts-fused": ("experts", FUSED),
    "dense-attention": ("dense", again("core_attn")),
    "dense-mlp": ("dense", again("core_attn", "mlp") | FUSED),
    "experts-moe": ("experts", again("moe")),
    "experts-shared": ("experts", again("shared_experts")),
}


@contextmanager
def _kept_bytes(model):
    """What each backward pass found kept for it, besides weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, found = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if torch._C._current_autograd_node() is None and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def use(tensor):
        if kept:
            found.append(sum(storage.nbytes() for storage in kept.values()))
            kept.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, use):
        yield found


def step_of(model, megatron):
    """Log-probabilities, the metrics and gradients of a step, the settings that it ran with, and the bytes it kept."""
    # With the plain optimizer the buckets keep the gradients of a step.
    plain = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False}}
    worker = tiny.worker(tiny.policy_config(model=model, megatron=plain | megatron, max_grad_norm=0.0))
    batch = tiny.grpo_batch()
    logprobs = worker.get_logprobs(data=batch)["logprobs"]
    with _kept_bytes(worker.backend.chunks[0]) as kept:
        metrics = worker.train(tiny.shard(batch), tiny.grpo_loss())
    settings = worker.backend.chunks[0].config
    gradients = {name: value.numpy() for name, value in tiny.gradients(worker).items()}
    used = settings.bias_activation_fusion, settings.recompute_granularity
    return logprobs.numpy(), gradients, metrics.get("moe_metrics", {}), used, max(kept)


@pytest.fixture(scope="module")
def plain(ranks):
    """What each model gives without any of it."""
    return {name: ranks(1).run(step_of, model, {})[0] for name, model in MODELS.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_plain_model(ranks, plain, case):
    name, megatron = CASES[case]
    logprobs, gradients, balance, used, kept = ranks(1).run(step_of, MODELS[name], megatron)[0]
    wanted_logprobs, wanted, wanted_balance, unused, all_kept = plain[name]
    assert logprobs == pytest.approx(wanted_logprobs, abs=LOGPROBS)
    assert balance == pytest.approx(wanted_balance, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for weight, gradient in wanted.items():
        assert abs(gradients[weight] - gradient).max() <= GRADIENTS * abs(gradient).max(), weight
    assert unused == (False, None)
    assert used == ("bias_activation_fusion" in megatron, megatron.get("recompute_granularity"))
    if case != "dense-attention":  # torch's attention keeps no scores: its inputs are all there is to spare
        assert kept < all_kept


def kept_by_two_layers(model, megatron, tokens):
    """The bytes that two more layers keep of a microbatch, and the estimate of `check`."""
    measured, estimated = [], []
    for layers in (2, 4):
        own = model | {"num_layers": layers, "hidden_size": 64, "ffn_hidden_size": 192}
        measured.append(step_of(own, megatron)[-1])
        estimated.append(activation_bytes(tiny.policy_config(model=own, megatron=megatron), tokens))
    return measured[1] - measured[0], estimated[1] - estimated[0]


@pytest.mark.parametrize(
    ("model", "more", "less"),
    [
        ("dense", {"bias_activation_fusion": False}, FUSED),
        ("dense", FUSED, again("mlp")),
        ("experts", FUSED, again("moe")),
    ],
    ids=["unfused", "mlp", "moe"],
)
def test_what_a_setting_spares_is_what_check_says(ranks, model, more, less):
    """Attention cancels out: on CPU it keeps copies that Transformer Engine's does not."""
    # Two rows of twelve tokens.
    measured, estimated = zip(
        *(ranks(1).run(kept_by_two_layers, MODELS[model], one, 24)[0] for one in (more, less)), strict=True
    )
    assert measured[0] - measured[1] == pytest.approx(estimated[0] - estimated[1], rel=0.1)


def test_full_recomputation_keeps_what_check_says(ranks):
    measured, estimated = ranks(1).run(kept_by_two_layers, {}, {"activation_checkpointing": True}, 24)[0]
    assert measured == pytest.approx(estimated, rel=0.1)
