"""The local attention against Megatron's stock one: same function, whatever hides the keys."""

import pytest
import tiny
import tiny_gpt_oss
import torch

CASES = ["causal layer", "causal mask", "separate documents", "newest query", "grouped heads"]


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


@pytest.mark.parametrize("case", CASES)
def test_local_attention_is_exact(ranks, case):
    for ours, _ in ranks(1).run(errors, case, "float32")[0]:
        assert ours < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_local_attention_is_no_worse_than_stock_in_bf16(ranks, case):
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
