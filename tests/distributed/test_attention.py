"""The local attention against Megatron's stock one: same function, whatever hides the keys."""

import pytest

CASES = ["causal layer", "causal mask", "separate documents", "newest query", "grouped heads"]


def errors(case, dtype_name):
    import tiny
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_rl_mcore.megatron.attention import LocalAttention

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


@pytest.mark.smoke("separate documents")
@pytest.mark.parametrize("case", CASES)
def test_local_attention_is_exact(ranks, case):
    for ours, _ in ranks(1).run(errors, case, "float32")[0]:
        assert ours < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_local_attention_is_no_worse_than_stock_in_bf16(ranks, case):
    for ours, stock in ranks(1).run(errors, case, "bfloat16")[0]:
        assert ours <= 1.25 * stock


def future_and_padding():
    import tiny
    import torch

    worker = tiny.worker(tiny.policy_config())
    batch = tiny.grpo_batch()
    before = worker.get_logprobs(data=batch)["logprobs"]
    changed = batch.slice(0, batch.size)
    changed["input_ids"] = batch["input_ids"].clone()
    changed["input_ids"][:, 8] = (changed["input_ids"][:, 8] + 1) % 32
    after = worker.get_logprobs(data=changed)["logprobs"]
    real = torch.arange(12) < batch["input_lengths"].unsqueeze(1)
    return torch.equal(before[:, :8], after[:, :8]), bool((before != after)[real].any())


def test_no_token_sees_the_future(ranks):
    past_is_equal, later_differs = ranks(1).run(future_and_padding)[0]
    assert past_is_equal
    assert later_differs
