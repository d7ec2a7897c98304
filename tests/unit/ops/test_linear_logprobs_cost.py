"""Products, allocations, saved state and 16-bit error of the fused kernels."""

import pytest
import torch
from distributed.plain_ops import linear_logprobs, plain_linear_logprobs_at
from operators import Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_mcore.ops._head import plan_tiling
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at

TOKENS, HIDDEN, VOCAB, K = 32, 8, 64, 4
LOGITS, FOR_HIDDEN, FOR_WEIGHT = (
    lambda n: (n, HIDDEN, VOCAB),
    lambda n: (n, VOCAB, HIDDEN),
    lambda n: (VOCAB, n, HIDDEN),
)


def at_targets(hidden, weight, ids, **keys) -> list[Tensor]:
    return list(fused_linear_logprobs(hidden, weight, ids[..., 0], with_entropy=True, **keys))


def alone(hidden, weight, ids, **keys) -> list[Tensor]:
    return [fused_linear_logprobs(hidden, weight, ids[..., 0], **keys)]


def at_ids(hidden, weight, ids, **keys) -> list[Tensor]:
    return list(linear_logprobs_at(hidden, weight, ids, with_tail=True, **keys))


def plain(kernel):
    """Return the kernel's twin over all the logits."""

    def twin(hidden, weight, ids, **keys):
        if kernel is at_ids:
            return list(plain_linear_logprobs_at(hidden, weight, ids, with_tail=True, **keys))
        return [*linear_logprobs(hidden, weight, ids[..., 0], with_entropy=True, **keys)]

    return twin


each_kernel = pytest.mark.parametrize("kernel", [at_targets, at_ids])


def problem(tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, k=K, dtype=torch.float32, seed=1):
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(tokens, 1, hidden, generator=noise).to(dtype).requires_grad_()
    weight_VH = (torch.randn(vocab, hidden, generator=noise) * (2 / hidden**0.5)).to(dtype).requires_grad_()
    return hidden_SBH, weight_VH, torch.rand(tokens, 1, vocab, generator=noise).argsort(-1)[..., :k]


@each_kernel
def test_never_allocates_tokens_by_vocabulary(kernel):
    tokens, hidden, vocab, k = 512, 16, 4096, 8
    inputs = problem(tokens, hidden, vocab, k)
    budget = 64 << 10
    with Recorder() as seen:
        sum(x.sum() for x in kernel(*inputs, options=LinearLogprobsOptions(chunk_bytes=budget))).backward()
    # The largest are the weight gradient, a tile and the statistics of the ids, not the 2 million logits.
    of_ids = tokens * (k + 1) * 3 if kernel is at_ids else 0
    assert seen.largest <= max(vocab * hidden, tokens * hidden, budget // 4, of_ids)
    with Recorder() as unfused:
        plain(kernel)(*inputs)
    assert unfused.largest == tokens * vocab


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
    hidden, weight, ids = problem(512, 16, 8192, dtype=torch.bfloat16)
    tile = 512 * 512 * 2
    with Allocations() as seen:
        out = fused_linear_logprobs(
            hidden, weight, ids[..., 0], options=LinearLogprobsOptions(chunk_bytes=tile)
        )
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


def every_fourth(output: int):
    """A gradient by one id of a token, by its tail or by its entropy is enough for the token to count."""
    return lambda out: out[output][::4].flatten(1)[:, -1].sum()


def whole(out):
    return out[0].sum()


ODD = torch.arange(TOKENS).view(TOKENS, 1) % 2
EVERY = [LOGITS(32), FOR_HIDDEN(32), FOR_WEIGHT(32)]
MASKED = (ODD, whole, "", [LOGITS(16)], [LOGITS(16), FOR_HIDDEN(16), FOR_WEIGHT(16)])


@pytest.mark.parametrize(
    ("kernel", "mask", "loss", "frozen", "forward", "backward"),
    [
        *((kernel, *MASKED) for kernel in (at_targets, at_ids)),
        *(
            (kernel, None, every_fourth(output), "", EVERY[:1], [LOGITS(8), FOR_HIDDEN(8), FOR_WEIGHT(8)])
            for kernel, outputs in ((at_targets, (0, 1)), (at_ids, (0, 1)))
            for output in outputs
        ),
        *(
            (kernel, None, whole, "hidden", EVERY[:1], [EVERY[0], EVERY[2]])
            for kernel in (at_targets, at_ids)
        ),
        (alone, None, whole, "weight", EVERY[:2], []),
        (at_ids, None, whole, "weight", EVERY[:1], EVERY[:2]),
    ],
)
def test_rows_and_inputs_without_a_gradient_enter_no_product(kernel, mask, loss, frozen, forward, backward):
    hidden, weight, ids = problem()
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    with Recorder() as before:
        out = kernel(hidden, weight, ids, mask=mask)
    value = loss(out)
    with Recorder() as after:
        value.backward()
    assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    assert (before.products, after.products) == (forward, backward)


def test_a_frozen_weight_costs_nothing_where_no_gradient_is_wanted():
    hidden, weight, ids = problem()
    with Recorder() as seen, torch.no_grad():
        at_targets(hidden, weight.requires_grad_(False), ids)
    assert seen.products == [LOGITS(32)]


def test_cached_logits_are_not_computed_again():
    out = at_ids(*problem(), options=LinearLogprobsOptions(cache_bytes=1 << 20))
    with Recorder() as seen:
        out[0].sum().backward()
    assert seen.products == EVERY[1:]


def test_the_main_grad_of_ids_is_added_to_and_the_hook_is_told():
    hidden, weight, ids = problem()
    (expected,) = torch.autograd.grad(at_ids(hidden, weight, ids)[0].sum(), weight)
    weight.main_grad = torch.full(weight.shape, 2.0)
    weight.grad_added_to_main_grad = False
    at_ids(hidden, weight, ids, options=LinearLogprobsOptions(accumulate_main_grad=True))[0].sum().backward()
    assert weight.grad_added_to_main_grad is True
    torch.testing.assert_close(weight.main_grad, 2 + expected)


@pytest.mark.parametrize(
    ("function", "outputs", "floats"),
    [
        (fused_linear_logprobs, {}, 1),
        (fused_linear_logprobs, {"with_entropy": True}, 2),
        (linear_logprobs_at, {}, K + 2),
        (linear_logprobs_at, {"with_tail": True}, K + 2),
    ],
)
def test_saved_state_is_a_few_floats_a_token(function, outputs, floats):
    hidden, weight, ids = problem()
    inputs = hidden, weight, ids[..., 0].contiguous() if function is fused_linear_logprobs else ids
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs, **outputs)
    theirs = {x.untyped_storage().data_ptr() for x in inputs}
    ours = [x for x in saved if x.untyped_storage().data_ptr() not in theirs]
    assert len(saved) - len(ours) == len(theirs)
    assert sum(x.numel() for x in ours) == TOKENS * floats


def results(function, inputs, **kwargs) -> list[Tensor]:
    """The outputs, and the gradients of hidden states and weight under a fixed weighting."""
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], **kwargs)
    loss = sum((torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x) * x).sum() for x in out)
    return [*(x.detach() for x in out), *torch.autograd.grad(loss, (hidden, weight))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((x.double() - r).norm() / r.norm()) for x, r in zip(found, exact, strict=True)]


@each_kernel
@pytest.mark.parametrize("panels", [1, 4, 16])
def test_16_bit_error_is_no_worse_than_unfused(kernel, panels):
    """Although each panel's product is rounded on CPU before it is added.

    The comparison of two roundings has noise of a hundredth, so it is averaged over several problems.
    """
    ratios: list[list[float]] = []
    for seed in range(6):
        inputs = problem(256, 32, 4096, 8, torch.bfloat16, seed)
        exact = results(plain(kernel), (inputs[0].double(), inputs[1].double(), inputs[2]))
        options = LinearLogprobsOptions(chunk_bytes=256 * 4096 * 2 // panels)
        unfused = errors(results(plain(kernel), inputs), exact)
        fused = errors(results(kernel, inputs, options=options), exact)
        ratios.append([f / p for f, p in zip(fused, unfused, strict=True)])
    assert torch.tensor(ratios).mean(0).max() <= 1.02, ratios


@each_kernel
def test_16_bit_weight_gradient_is_flat_in_the_number_of_chunks(kernel):
    inputs = problem(512, 64, 512, 8, torch.bfloat16)
    exact = results(plain(kernel), (inputs[0].double(), inputs[1].double(), inputs[2]))
    by_chunks = [
        errors(results(kernel, inputs, options=LinearLogprobsOptions(chunk_size=512 // chunks)), exact)[-1]
        for chunks in (1, 4, 16, 64, 256)
    ]
    assert max(by_chunks) <= 1.3 * by_chunks[0], by_chunks


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_outputs_are_float32_and_gradients_keep_their_dtype(kernel, dtype):
    hidden, weight, ids = problem(dtype=dtype)
    out = kernel(hidden, weight, ids)
    grads = torch.autograd.grad(sum(x.sum() for x in out), (hidden, weight))
    assert {x.dtype for x in out} == {torch.float32}
    assert {x.dtype for x in grads} == {dtype}
