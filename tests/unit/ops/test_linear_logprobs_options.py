"""The logits cache, accumulation into main_grad and the frozen head: the same numbers by other routes."""

from dataclasses import replace

import pytest
import torch
from distributed.plain_ops import linear_logprobs
from operators import Recorder
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import (
    LinearLogprobsOptions,
    fused_linear_logprobs,
)

TOKENS, HIDDEN, VOCAB = 24, 8, 700
# Three panels of at most 256 columns, by chunks of 5 rows; and one chunk of all rows.
TILINGS = [LinearLogprobsOptions(chunk_bytes=4 * 256 * 5), LinearLogprobsOptions(chunk_size=TOKENS)]
GRAD = torch.sin(torch.arange(TOKENS, dtype=torch.float32)).view(TOKENS, 1)
SPARSE_GRAD = torch.where(torch.arange(TOKENS).view(TOKENS, 1) % 3 == 0, 0.0, GRAD)


def problem(dtype=torch.float32, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=noise).to(dtype).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, generator=noise).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (TOKENS, 1), generator=noise)


def backward(
    options: LinearLogprobsOptions,
    grad: Tensor,
    dtype=torch.float32,
    with_entropy: bool = False,
    vocab: int = VOCAB,
):
    """(number of products in the backward, gradients of hidden states and weight)."""
    hidden, weight, targets = problem(dtype, vocab)
    out = fused_linear_logprobs(
        hidden, weight, targets, temperature=0.7, with_entropy=with_entropy, options=options
    )
    loss = sum((x * grad).sum() for x in (out if with_entropy else (out,)))
    with Recorder() as seen:
        loss.backward()
    return len(seen.products), hidden.grad, weight.grad


@pytest.mark.parametrize(("budget_panels", "kept"), [(0, 0), (0.99, 0), (1, 1), (2.5, 2), (3, 3)])
def test_the_cache_holds_whole_panels_within_its_budget(budget_panels, kept):
    tiling = replace(TILINGS[0], vocab_size=768)  # three panels of 256
    without = backward(tiling, GRAD, vocab=768)[0]
    chunks = without // 3 // 3
    budget = int(budget_panels * TOKENS * 256 * 4)
    products, *_ = backward(replace(tiling, cache_bytes=budget), GRAD, vocab=768)
    assert products == without - kept * chunks


def test_nothing_is_cached_without_a_backward():
    hidden, weight, targets = problem()
    options = replace(TILINGS[0], cache_bytes=1 << 30)
    with Recorder() as seen, torch.no_grad():
        fused_linear_logprobs(hidden, weight, targets, options=options)
    assert seen.largest <= TOKENS * VOCAB // 3  # a panel has a little more


@pytest.mark.each_value
@pytest.mark.parametrize("tiling", TILINGS, ids=["panels", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_out", [False, True])
def test_main_grad_is_added_to_and_the_hook_is_told(tiling, dtype, zero_out):
    """As ColumnParallelLinear with gradient_accumulation_fusion leaves it for Megatron's DDP hook."""
    _, expected_hidden, expected = backward(tiling, GRAD, dtype)
    hidden, weight, targets = problem(dtype)
    weight.main_grad = torch.full(weight.shape, 2.0)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    options = replace(tiling, accumulate_main_grad=True, vocab_size=VOCAB)
    for _ in range(2):
        out = fused_linear_logprobs(hidden, weight, targets, temperature=0.7, options=options)
        hidden.grad = weight.grad = None
        out.backward(GRAD)
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == dtype
    assert not zero_out or not weight.grad.any()
    assert torch.equal(hidden.grad, expected_hidden)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight.main_grad, 2 + 2 * expected.float(), rtol=rounding, atol=rounding)


def test_main_grad_without_megatrons_flag_gives_autograd_nothing():
    hidden, weight, targets = problem()
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    options = LinearLogprobsOptions(accumulate_main_grad=True)
    fused_linear_logprobs(hidden, weight, targets, options=options).backward(GRAD)
    assert weight.grad is None
    assert weight.main_grad.any()


def test_main_grad_of_padded_rows_and_of_no_rows():
    hidden, weight, targets = problem()
    weight.main_grad = torch.zeros_like(weight)
    options = LinearLogprobsOptions(accumulate_main_grad=True, vocab_size=600)
    fused_linear_logprobs(hidden, weight, targets % 600, options=options).backward(GRAD)
    assert weight.main_grad[:600].any(1).all()
    assert not weight.main_grad[600:].any()
    before = weight.main_grad.clone()
    nothing = torch.zeros(TOKENS, 1)
    fused_linear_logprobs(hidden, weight, targets % 600, mask=nothing, options=options).backward(GRAD)
    assert torch.equal(weight.main_grad, before)


def test_a_weight_without_main_grad_is_refused_unless_frozen():
    hidden, weight, targets = problem()
    options = LinearLogprobsOptions(accumulate_main_grad=True)
    with pytest.raises(ValueError, match="main_grad"):
        fused_linear_logprobs(hidden, weight, targets, options=options)
    fused_linear_logprobs(hidden, weight.detach(), targets, options=options).backward(GRAD)
    assert hidden.grad is not None


@pytest.mark.each_value
@pytest.mark.parametrize("tiling", TILINGS, ids=["panels", "whole"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_frozen_head(tiling, with_entropy, masked, dtype, tolerance):
    """Large logits in the last panel make the running sum rescale what the first panels left."""
    hidden, weight, targets = (x.detach() for x in problem())
    weight = weight * torch.linspace(0.2, 2, VOCAB).unsqueeze(1)
    kwargs = {
        "temperature": 0.7,
        "with_entropy": with_entropy,
        "mask": torch.arange(TOKENS).view(TOKENS, 1) % 4 if masked else None,
        "options": replace(tiling, vocab_size=650, logit_scale=0.8),
    }
    results = []
    for function, precision in ((linear_logprobs, torch.float64), (fused_linear_logprobs, dtype)):
        leaf = hidden.to(precision).requires_grad_()
        out = function(leaf, weight.to(precision), targets % 650, **kwargs)
        outputs = out if with_entropy else (out,)
        sum((x * SPARSE_GRAD).sum() for x in outputs).backward()
        results.append([*(x.detach() for x in outputs), leaf.grad])
    *expected, expected_grad = results[0]
    *actual, grad = results[1]
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=0, atol=10 * tolerance)
    assert float((grad - expected_grad).norm() / expected_grad.norm()) <= tolerance


def test_frozen_head_saves_the_direction_alone():
    hidden, weight, targets = problem()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused_linear_logprobs(hidden, weight.detach(), targets)
    assert [x.shape for x in saved] == [(TOKENS, HIDDEN)]


def test_frozen_head_in_16_bit_is_no_worse_than_unfused():
    hidden, weight, targets = problem(torch.bfloat16, vocab=512)
    grads = {}
    for name, function, dtype in (
        ("exact", linear_logprobs, torch.float64),
        ("unfused", linear_logprobs, torch.bfloat16),
        ("fused", fused_linear_logprobs, torch.bfloat16),
    ):
        leaf = hidden.detach().to(dtype).requires_grad_()
        function(leaf, weight.detach().to(dtype), targets).backward(GRAD.to(torch.float32))
        grads[name] = leaf.grad.double()
    errors = {name: float((grad - grads["exact"]).norm()) for name, grad in grads.items()}
    assert 0 < errors["fused"] <= 1.1 * errors["unfused"]
