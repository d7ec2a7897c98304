"""Fused kernels and parts that are computed again give the gradients of the plain model, and do what they are for."""

from contextlib import contextmanager

import pytest
import tiny
import tiny_gpt_oss
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


MODEL = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 16}}


def steps_with_and_without_overlap(fused, entropy_coef, layout, layers, sections=None):
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

    plans = []
    plain_init = TransformerModelChunkSchedulePlan.__init__

    def counted(self, *args, **kwargs):
        plans.append(kwargs["output_processor_context"])
        plain_init(self, *args, **kwargs)

    results = []
    for overlap in (False, True):
        worker = tiny.worker(
            tiny.policy_config(
                precision="bfloat16",
                model=MODEL | {"num_layers": layers},
                megatron=layout
                | {
                    "expert_model_parallel_size": 2,
                    "overlap_moe_expert_parallel_comm": overlap,
                    "use_fused_linear_logprobs": fused,
                    "fused_linear_logprobs_chunk_size": 5,
                    "fused_linear_logprobs_packed": fused and sections is not None,
                },
                **(sections or {}),
            )
        )
        TransformerModelChunkSchedulePlan.__init__ = counted
        try:
            loss_fn = tiny.grpo_loss(fused=fused, entropy_coef=entropy_coef)
            worker.begin_train_step(loss_fn, mbs=1)
            batch = tiny.shard(tiny.grpo_batch())
            for start in (0, 2):
                worker.train_microbatch(batch.slice(start, start + 2))
            gradients = tiny.gradients(worker)
            result = worker.finish_train_step()
        finally:
            TransformerModelChunkSchedulePlan.__init__ = plain_init
        results.append((result["all_mb_metrics"], gradients, tiny.parameters(worker), len(plans)))
    (metrics, gradients, weights, none), (own_metrics, own_gradients, own_weights, some) = results
    assert (none, some > 0) == (0, True)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
    return (
        metrics == own_metrics,
        all(torch.equal(gradients[name], own_gradients[name]) for name in gradients),
        all(torch.equal(weights[name], own_weights[name]) for name in weights),
    )


INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
# Ranks, fused, the coefficient of the entropy, keys of Megatron, layers, sections.
SCHEDULES = {
    "unfused": (2, False, 0.0, {}, 2, None),
    "fused": (2, True, 0.0, {}, 2, None),
    "unfused-entropy": (2, False, 0.01, {}, 2, None),
    "fused-entropy": (2, True, 0.01, {}, 2, None),
    "interleaved": (4, True, 0.01, INTERLEAVED, 4, None),
    "unfused-packed": (2, False, 0.01, {}, 2, PACKED),
    "fused-packed": (2, True, 0.01, {}, 2, PACKED),
}


@pytest.mark.quick_cases("unfused", "fused", "unfused-entropy", "interleaved")
@pytest.mark.parametrize("case", SCHEDULES)
def test_overlap_changes_no_bit(ranks, case):
    world_size, *given = SCHEDULES[case]
    for rank in ranks(world_size).run(steps_with_and_without_overlap, *given):
        assert rank == (True, True, True)


# The local attention


ATTENTIONS = ["causal layer", "causal mask", "separate documents", "newest query", "grouped heads"]


def errors(case, dtype_name):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_rl_mcore.rank.megatron.layer_specs import LocalAttention

    groups = 2 if case == "grouped heads" else 4
    config = tiny.worker(tiny.policy_config(model={"num_query_groups": groups})).backend.config
    queries, keys, dtype = (1 if case == "newest query" else 9), 9, getattr(torch, dtype_name)
    noise = torch.Generator().manual_seed(0)
    shapes = [(queries, 2, 4, 8), (keys, 2, groups, 8), (keys, 2, groups, 8)]
    tensors = [torch.randn(shape, generator=noise).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(queries, 2, 32, generator=noise).to(dtype)
    causal = torch.ones(1, 1, keys, keys, dtype=torch.bool).triu(1)
    document = torch.arange(keys) // 4
    masks = {
        "causal mask": causal,
        "separate documents": causal | (document.unsqueeze(1) != document),
        "newest query": None,
    }

    def run(attention_class, mask, dtype=dtype):
        config.params_dtype = dtype
        attention = attention_class(config, 1, AttnMaskType.causal, "self")
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = attention(*inputs, mask)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    exact = run(DotProductAttention, masks.get(case, causal), torch.float64)
    ours, stock = run(LocalAttention, masks.get(case)), run(DotProductAttention, masks.get(case, causal))
    return [
        (float((a - e).norm() / e.norm()), float((b - e).norm() / e.norm()))
        for a, b, e in zip(ours, stock, exact, strict=True)
    ]


@pytest.mark.parametrize("case", ATTENTIONS)
def test_local_attention_is_exact_and_in_bf16_no_worse_than_stock(ranks, case):
    for ours, _ in ranks(1).run(errors, case, "float32")[0]:
        assert ours < 1e-6
    for ours, stock in ranks(1).run(errors, case, "bfloat16")[0]:
        assert ours <= 1.25 * stock


def errors_with_sinks(queries, keys, window, masked):
    """Of the output, and of gradients of queries, keys, values and sinks, beside a softmax that is written out."""
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_rl_mcore.rank.megatron.layer_specs import LocalAttention

    config = tiny.worker(tiny.policy_config(model=tiny_gpt_oss.MODEL)).backend.config
    config.window_size = None if window is None else (window - 1, 0)
    config.window_attn_skip_freq = None
    attention = LocalAttention(config, 1, AttnMaskType.causal, "self")
    noise = torch.Generator().manual_seed(0)
    shapes = [(queries, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 8)]
    tensors = [torch.randn(shape, generator=noise).requires_grad_() for shape in shapes]
    attention.softmax_offset.data = torch.randn(4, generator=noise)
    grad = torch.randn(queries, 2, 32, generator=noise)
    place = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    hidden = (place < 0) | (place >= (window or keys))
    documents = torch.arange(keys) // 7
    other = (documents[keys - queries :].unsqueeze(1) != documents) | (place < 0)
    mask = other[None, None] if masked else None
    out = attention(*tensors, mask)
    found = [out, *torch.autograd.grad(out, [*tensors, attention.softmax_offset], grad)]

    exact = [x.detach().double().requires_grad_() for x in (*tensors, attention.softmax_offset)]
    query, key, value = (x.permute(1, 2, 0, 3) for x in exact[:3])
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ key.mT / 8**0.5).masked_fill(hidden | other if masked else hidden, -torch.inf)
    sinks = exact[3].view(1, 4, 1, 1).expand(2, 4, queries, 1)
    shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    wanted_out = (shares @ value).permute(2, 0, 1, 3).flatten(2)
    wanted = [wanted_out, *torch.autograd.grad(wanted_out, exact, grad.double())]
    return [float((a - e).norm() / e.norm()) for a, e in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    ("queries", "keys", "window", "masked"),
    [(9, 9, None, False), (9, 9, 1, False), (9, 9, 4, True), (1, 9, 4, False), (1100, 1100, 600, False)],
    ids=["no-window", "itself", "documents", "newest", "blocks"],
)
def test_windows_and_sinks_are_exact(ranks, queries, keys, window, masked):
    (found,) = ranks(1).run(errors_with_sinks, queries, keys, window, masked)
    assert max(found) < 2e-6, found
