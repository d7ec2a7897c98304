"""What `linear_logprobs_at` computes, allocates and saves, its 16-bit error, and where gradients go."""

import pytest
import torch
from distributed.plain_ops import plain_linear_logprobs_at
from operators import Recorder
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at

TOKENS, HIDDEN, VOCAB, K = 32, 8, 64, 4
LOGITS, FOR_HIDDEN, FOR_WEIGHT = (
    lambda n: (n, HIDDEN, VOCAB),
    lambda n: (n, VOCAB, HIDDEN),
    lambda n: (VOCAB, n, HIDDEN),
)


def problem(tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, k=K, dtype=torch.float32, seed=1):
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(tokens, 1, hidden, generator=noise).to(dtype).requires_grad_()
    weight_VH = (torch.randn(vocab, hidden, generator=noise) * (2 / hidden**0.5)).to(dtype).requires_grad_()
    return hidden_SBH, weight_VH, torch.rand(tokens, 1, vocab, generator=noise).argsort(-1)[..., :k]


def test_never_allocates_tokens_by_vocabulary():
    tokens, hidden, vocab, k = 512, 16, 4096, 8
    inputs = problem(tokens, hidden, vocab, k)
    budget = 64 << 10
    options = LinearLogprobsOptions(chunk_bytes=budget)
    with Recorder() as seen:
        out = linear_logprobs_at(*inputs, with_tail=True, with_entropy=True, options=options)
        sum(x.sum() for x in out if x is not None).backward()
    # The largest are the weight gradient, a tile and the statistics of the ids, not the 2 million logits.
    assert seen.largest <= max(vocab * hidden, budget // 4, tokens * (k + 1) * 3)


@pytest.mark.parametrize(
    ("outputs", "floats"), [({}, K + 2), ({"with_tail": True, "with_entropy": True}, K + 3)]
)
def test_saved_state_is_a_few_floats_an_id(outputs, floats):
    inputs = problem()
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_logprobs_at(*inputs, **outputs)
    theirs = {x.untyped_storage().data_ptr() for x in inputs}
    ours = [x for x in saved if x.untyped_storage().data_ptr() not in theirs]
    assert len(saved) - len(ours) == len(theirs)
    assert sum(x.numel() for x in ours) == TOKENS * floats


def products(mask: Tensor | None, loss, frozen: str = "") -> tuple[list, list]:
    hidden, weight, ids = problem()
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    with Recorder() as forward:
        out = linear_logprobs_at(hidden, weight, ids, mask=mask, with_tail=True, with_entropy=True)
    value = loss(out)
    with Recorder() as backward:
        value.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    return forward.products, backward.products


def test_masked_rows_enter_no_product():
    forward, backward = products(torch.arange(TOKENS).view(TOKENS, 1) % 2, lambda out: out.logprobs.sum())
    assert forward == [LOGITS(16)]
    assert backward == [LOGITS(16), FOR_HIDDEN(16), FOR_WEIGHT(16)]


@pytest.mark.parametrize("output", [0, 1, 2])
def test_rows_without_gradient_enter_no_product_of_the_backward(output):
    """A gradient by one id of a token, by its tail or by its entropy is enough for the token to count."""
    forward, backward = products(None, lambda out: out[output][::4].flatten(1)[:, -1].sum())
    assert forward == [LOGITS(32)]
    assert backward == [LOGITS(8), FOR_HIDDEN(8), FOR_WEIGHT(8)]


def test_frozen_inputs_cost_no_product():
    assert products(None, lambda out: out.logprobs.sum(), "hidden")[1] == [LOGITS(32), FOR_WEIGHT(32)]
    assert products(None, lambda out: out.logprobs.sum(), "weight")[1] == [LOGITS(32), FOR_HIDDEN(32)]


def test_cached_logits_are_not_computed_again():
    hidden, weight, ids = problem()
    out = linear_logprobs_at(hidden, weight, ids, options=LinearLogprobsOptions(cache_bytes=1 << 20))
    with Recorder() as seen:
        out.logprobs.sum().backward()
    assert seen.products == [FOR_HIDDEN(32), FOR_WEIGHT(32)]


def test_main_grad_is_added_to_and_the_hook_is_told():
    hidden, weight, ids = problem()
    (expected,) = torch.autograd.grad(linear_logprobs_at(hidden, weight, ids).logprobs.sum(), weight)
    weight.main_grad = torch.full(weight.shape, 2.0)
    weight.grad_added_to_main_grad = False
    options = LinearLogprobsOptions(accumulate_main_grad=True)
    linear_logprobs_at(hidden, weight, ids, options=options).logprobs.sum().backward()
    assert weight.grad_added_to_main_grad is True
    torch.testing.assert_close(weight.main_grad, 2 + expected)


def errors(function, inputs, reference: list[Tensor], **kwargs) -> list[float]:
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], with_tail=True, with_entropy=True, **kwargs)
    loss = sum((torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x) * x).sum() for x in out)
    results = [*(x.detach() for x in out), *torch.autograd.grad(loss, (hidden, weight))]
    if not reference:
        reference.extend(x.double() for x in results)
    return [float((x.double() - r).norm() / r.norm()) for x, r in zip(results, reference, strict=True)]


def compared(inputs, **kwargs) -> tuple[list[float], list[float]]:
    """Errors of the plain twin and of the kernel in the dtype of the inputs, against float64."""
    reference: list[Tensor] = []
    errors(plain_linear_logprobs_at, (inputs[0].double(), inputs[1].double(), inputs[2]), reference)
    plain = errors(plain_linear_logprobs_at, inputs, reference)
    return plain, errors(linear_logprobs_at, inputs, reference, **kwargs)


@pytest.mark.parametrize("panels", [1, 4, 16])
def test_16_bit_error_is_no_worse_than_unfused(panels):
    """Of two roundings the ratio has noise of a hundredth, so it is averaged over several problems."""
    ratios: list[list[float]] = []
    for seed in range(4):
        inputs = problem(256, 32, 4096, 8, torch.bfloat16, seed)
        options = LinearLogprobsOptions(chunk_bytes=256 * 4096 * 2 // panels)
        plain, fused = compared(inputs, options=options)
        ratios.append([f / p for f, p in zip(fused, plain, strict=True)])
    assert torch.tensor(ratios).mean(0).max() <= 1.01, ratios


def test_16_bit_weight_gradient_is_flat_in_the_number_of_chunks():
    inputs = problem(512, 64, 512, 8, torch.bfloat16)
    by_chunks = [
        compared(inputs, options=LinearLogprobsOptions(chunk_size=512 // chunks))[1][-1]
        for chunks in (1, 4, 16, 64, 256)
    ]
    assert max(by_chunks) <= 1.3 * by_chunks[0], by_chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_outputs_are_float32_and_gradients_keep_their_dtype(dtype):
    hidden, weight, ids = problem(dtype=dtype)
    out = linear_logprobs_at(hidden, weight, ids, with_tail=True, with_entropy=True)
    sum(x.sum() for x in out if x is not None).backward()
    assert {x.dtype for x in out if x is not None} == {torch.float32}
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
