"""What the fused kernel computes, allocates and saves, and how its 16-bit error behaves."""

import pytest
import torch
from distributed.plain_ops import linear_logprobs
from operators import Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_mcore.ops._head import plan_tiling
from nemo_rl_mcore.ops.linear_logprobs import (
    LinearLogprobsOptions,
    fused_linear_logprobs,
)


def problem(
    tokens: int, hidden: int, vocab: int, dtype=torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(tokens, 1, hidden, generator=noise).to(dtype).requires_grad_()
    weight_VH = (torch.randn(vocab, hidden, generator=noise) * (2 / hidden**0.5)).to(dtype).requires_grad_()
    return hidden_SBH, weight_VH, torch.randint(0, vocab, (tokens, 1), generator=noise)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_never_allocates_tokens_by_vocabulary(with_entropy):
    tokens, hidden, vocab = 512, 16, 4096
    inputs = problem(tokens, hidden, vocab)
    budget = 64 << 10
    options = LinearLogprobsOptions(chunk_bytes=budget)
    with Recorder() as seen:
        out = fused_linear_logprobs(*inputs, with_entropy=with_entropy, options=options)
        sum(x.sum() for x in (out if with_entropy else (out,))).backward()
    # The largest are the weight gradient and a tile, not the 2 million logits.
    assert seen.largest <= max(vocab * hidden, tokens * hidden, budget // 4)
    with Recorder() as plain:
        linear_logprobs(*inputs)
    assert plain.largest == tokens * vocab


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that an operator returned and that shares no memory with an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in inputs:
                self.created.append(leaf.untyped_storage().nbytes())
        return out


def test_all_tiles_of_a_pass_share_their_memory():
    """Of the size of a tile there is one allocation in the forward and one in the backward, for 16 tiles."""
    inputs = problem(512, 16, 8192, torch.bfloat16)
    tile = 512 * 512 * 2
    with Allocations() as seen:
        out = fused_linear_logprobs(*inputs, options=LinearLogprobsOptions(chunk_bytes=tile))
        out.backward(torch.ones(512, 1))
    assert seen.created.count(tile) == 2
    # Besides, only the scratch blocks of the elementwise passes are as large.
    assert {size for size in seen.created if size > tile} == {4 * (1 << 18)}


def test_tiles_fit_the_budget():
    for rows, vocab in ((1, 1), (37, 300), (5000, 1000), (8192, 152_064)):
        for chunk_bytes in (1, 4096, 1 << 20, 64 << 20):
            tiling = plan_tiling(rows, vocab, bytes_per_logit=6, chunk_bytes=chunk_bytes, chunk_size=None)
            assert 1 <= tiling.rows <= rows
            assert 1 <= tiling.cols <= vocab
            assert tiling.rows * tiling.cols * 6 <= max(chunk_bytes, 6 * 256)
            # What GPUs multiply at full speed: a tile whose rows begin at 16 bytes, in blocks of 128 columns.
            assert tiling.cols % 128 == 0 or tiling.cols == vocab
    whole = plan_tiling(100, 70_000, bytes_per_logit=6, chunk_bytes=1, chunk_size=32)
    assert (whole.rows, whole.cols) == (32, 70_000)


def products(mask: Tensor | None, grad: Tensor, frozen: str = "") -> tuple[list, list]:
    hidden, weight, targets = problem(32, 8, 64)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    with Recorder() as forward:
        out = fused_linear_logprobs(hidden, weight, targets, mask=mask)
    with Recorder() as backward:
        out.backward(grad)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    return forward.products, backward.products


LOGITS, HIDDEN, WEIGHT = (lambda n: (n, 8, 64)), (lambda n: (n, 64, 8)), (lambda n: (64, n, 8))


ROWS = torch.arange(32).view(32, 1)


@pytest.mark.parametrize(
    ("mask", "grad", "frozen", "forward", "backward"),
    [
        (ROWS % 2, torch.ones(32, 1), "", [LOGITS(16)], [LOGITS(16), HIDDEN(16), WEIGHT(16)]),
        (None, (ROWS % 4 == 0).float(), "", [LOGITS(32)], [LOGITS(8), HIDDEN(8), WEIGHT(8)]),
        (None, torch.ones(32, 1), "hidden", [LOGITS(32)], [LOGITS(32), WEIGHT(32)]),
        (None, torch.ones(32, 1), "weight", [LOGITS(32), HIDDEN(32)], []),
    ],
    ids=["masked rows", "rows without gradient", "frozen hidden states", "frozen weight"],
)
def test_what_nothing_asks_for_enters_no_product(mask, grad, frozen, forward, backward):
    assert products(mask, grad, frozen) == (forward, backward)


def test_a_frozen_weight_costs_nothing_where_no_gradient_is_wanted():
    hidden, weight, targets = problem(32, 8, 64)
    weight.requires_grad_(False)
    with Recorder() as seen, torch.no_grad():
        fused_linear_logprobs(hidden, weight, targets)
    assert seen.products == [LOGITS(32)]


@pytest.mark.parametrize(("with_entropy", "floats"), [(False, 1), (True, 2)])
def test_saved_state_is_a_few_floats_a_token(with_entropy, floats):
    hidden, weight, targets = problem(32, 8, 64)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fused_linear_logprobs(hidden, weight, targets, with_entropy=with_entropy)
    theirs = {x.untyped_storage().data_ptr() for x in (hidden, weight, targets)}
    ours = [x for x in saved if x.untyped_storage().data_ptr() not in theirs]
    assert len(saved) - len(ours) == len(theirs)
    assert sum(x.numel() for x in ours) == 32 * floats


def errors(function, inputs, reference, **kwargs) -> list[float]:
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], **kwargs)
    scale = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    results = [out.detach(), *torch.autograd.grad((out * scale).sum(), (hidden, weight))]
    if not reference:
        reference.extend(x.double() for x in results)
    return [float((x.double() - r).norm() / r.norm()) for x, r in zip(results, reference, strict=True)]


def test_16_bit_error():
    """No worse than unfused, and the weight gradient's error does not grow with the number of chunks."""
    hidden, weight, targets = problem(512, 64, 512, torch.bfloat16)
    reference: list[Tensor] = []
    errors(linear_logprobs, (hidden.double(), weight.double(), targets), reference)
    plain = errors(linear_logprobs, (hidden, weight, targets), reference)
    fused = errors(fused_linear_logprobs, (hidden, weight, targets), reference)
    assert all(f <= 1.02 * p for f, p in zip(fused, plain, strict=True)), (fused, plain)
    by_chunks = [
        errors(
            fused_linear_logprobs,
            (hidden, weight, targets),
            reference,
            options=LinearLogprobsOptions(chunk_size=512 // chunks),
        )[2]
        for chunks in (1, 4, 16, 64, 256)
    ]
    assert max(by_chunks) <= 1.3 * by_chunks[0], by_chunks


@pytest.mark.parametrize("panels", [1, 4, 16])
def test_16_bit_error_is_flat_in_the_number_of_panels(panels):
    """No worse than unfused, although each panel's product is rounded on CPU before it is added.

    The comparison of two roundings has noise of a hundredth, so it is made over several problems.
    """
    ratios: list[list[float]] = []
    for seed in range(6):
        inputs = problem(256, 32, 4096, torch.bfloat16, seed=seed)
        reference: list[Tensor] = []
        errors(linear_logprobs, (inputs[0].double(), inputs[1].double(), inputs[2]), reference)
        plain = errors(linear_logprobs, inputs, reference)
        options = LinearLogprobsOptions(chunk_bytes=256 * 4096 * 2 // panels)
        fused = errors(fused_linear_logprobs, inputs, reference, options=options)
        ratios.append([f / p for f, p in zip(fused, plain, strict=True)])
    assert torch.tensor(ratios).mean(0).max() <= 1.02, ratios


def test_16_bit_outputs_are_float32_and_gradients_keep_their_dtype():
    hidden, weight, targets = problem(8, 8, 64, torch.bfloat16)
    logprobs, entropy = fused_linear_logprobs(hidden, weight, targets, with_entropy=True)
    (logprobs + entropy).sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
