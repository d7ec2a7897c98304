"""Products, allocations, saved state and 16-bit error of the fused kernels, and the same numbers by other routes.

Other routes are the logits cache, accumulation into main_grad and the frozen head.
"""

import gc
from dataclasses import replace

import pytest
import torch
from distributed.plain_ops import linear_logprobs, plain_linear_logprobs_at
from operators import Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_mcore.config.megatron import LOGITS_CACHE as AUTO
from nemo_rl_mcore.ops._head import LogitsCache, plan_tiling
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at

TOKENS, HIDDEN, VOCAB, K = 32, 8, 64, 4
LOGITS, FOR_HIDDEN, FOR_WEIGHT = (
    lambda n: (n, HIDDEN, VOCAB),
    lambda n: (n, VOCAB, HIDDEN),
    lambda n: (VOCAB, n, HIDDEN),
)


def at_targets(hidden, weight, ids, **keys):
    return list(fused_linear_logprobs(hidden, weight, ids[..., 0], with_entropy=True, **keys))


def alone(hidden, weight, ids, **keys):
    return [fused_linear_logprobs(hidden, weight, ids[..., 0], **keys)]


def at_ids(hidden, weight, ids, **keys):
    return list(linear_logprobs_at(hidden, weight, ids, with_tail=True, **keys))


def plain(kernel):
    """Return the kernel's twin over all the logits."""

    def twin(hidden, weight, ids, **keys):
        if kernel is at_ids:
            return list(plain_linear_logprobs_at(hidden, weight, ids, with_tail=True, **keys))
        return [*linear_logprobs(hidden, weight, ids[..., 0], with_entropy=True, **keys)]

    return twin


each_kernel = pytest.mark.parametrize("kernel", [at_targets, at_ids])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)


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

    def __init__(self):
        super().__init__()
        self.created = []

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


def every_fourth(output):
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
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs, **outputs)
    theirs = {x.untyped_storage().data_ptr() for x in inputs}
    ours = [x for x in saved if x.untyped_storage().data_ptr() not in theirs]
    assert len(saved) - len(ours) == len(theirs)
    assert sum(x.numel() for x in ours) == TOKENS * floats


def results(function, inputs, **kwargs):
    """The outputs, and the gradients of hidden states and weight under a fixed weighting."""
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], **kwargs)
    loss = sum((torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x) * x).sum() for x in out)
    return [*(x.detach() for x in out), *torch.autograd.grad(loss, (hidden, weight))]


def errors_of(found, exact):
    return [float((x.double() - r).norm() / r.norm()) for x, r in zip(found, exact, strict=True)]


@each_kernel
@pytest.mark.parametrize("panels", [1, 4, 16])
def test_16_bit_error_is_no_worse_than_unfused(kernel, panels):
    """Although each panel's product is rounded on CPU before it is added.

    The comparison of two roundings has noise of a hundredth, so it is averaged over several problems.
    """
    ratios = []
    for seed in range(6):
        inputs = problem(256, 32, 4096, 8, torch.bfloat16, seed)
        exact = results(plain(kernel), (inputs[0].double(), inputs[1].double(), inputs[2]))
        options = LinearLogprobsOptions(chunk_bytes=256 * 4096 * 2 // panels)
        unfused = errors_of(results(plain(kernel), inputs), exact)
        fused = errors_of(results(kernel, inputs, options=options), exact)
        ratios.append([f / p for f, p in zip(fused, unfused, strict=True)])
    assert torch.tensor(ratios).mean(0).max() <= 1.02, ratios


@each_kernel
def test_16_bit_weight_gradient_is_flat_in_the_number_of_chunks(kernel):
    inputs = problem(512, 64, 512, 8, torch.bfloat16)
    exact = results(plain(kernel), (inputs[0].double(), inputs[1].double(), inputs[2]))
    by_chunks = [
        errors_of(results(kernel, inputs, options=LinearLogprobsOptions(chunk_size=512 // chunks)), exact)[-1]
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


# The logits cache: the bits stay the same, the budget is kept, the memory is given back


ROWS, WORDS = 24, 700
# Three panels of at most 256 columns, by chunks of 5 rows; and one chunk of all rows.
PANELS, WHOLE = LinearLogprobsOptions(chunk_bytes=4 * 256 * 5), LinearLogprobsOptions(chunk_size=ROWS)
each_tiling = pytest.mark.parametrize("tiling", [PANELS, WHOLE], ids=["panels", "whole"])
GRAD = torch.sin(torch.arange(ROWS, dtype=torch.float32)).view(ROWS, 1)


def head(dtype=torch.float32, vocab=WORDS, k=1):
    return problem(ROWS, HIDDEN, vocab, k, dtype, seed=5)


def backward(kernel, inputs, options):
    """The number of products in the backward of the log-probabilities."""
    logprobs = kernel(*inputs, temperature=0.7, options=options)[0]
    with Recorder() as seen:
        (logprobs.view(ROWS, -1) * GRAD).sum().backward()
    return len(seen.products)


@pytest.mark.parametrize(("budget_panels", "kept"), [(0, 0), (0.99, 0), (1, 1), (2.5, 2), (3, 3)])
def test_the_cache_holds_whole_panels_within_its_budget(budget_panels, kept):
    tiling = replace(PANELS, vocab_size=768)  # three panels of 256
    without = backward(alone, head(vocab=768), tiling)
    chunks = without // 3 // 3
    budget = int(budget_panels * ROWS * 256 * 4)
    assert backward(alone, head(vocab=768), replace(tiling, cache_bytes=budget)) == without - kept * chunks


def test_nothing_is_cached_without_a_backward():
    inputs = head()
    with Recorder() as seen, torch.no_grad():
        alone(*inputs, options=replace(PANELS, cache_bytes=1 << 30))
    assert seen.largest <= ROWS * WORDS // 3  # a panel has a little more


# Eight panels of 256 columns, in two chunks of rows or more.
UNCACHED = LinearLogprobsOptions(chunk_bytes=8 << 10)
AUTO_OPTIONS = replace(UNCACHED, cache_bytes=AUTO.limit, cache_bytes_per_logit=AUTO.bytes_per_logit)


def of_2048_words(kernel, options, dtype, mask=None):
    inputs = problem(TOKENS, HIDDEN, 2048, 3, dtype, seed=5)
    return kernel(*inputs, temperature=0.7, mask=mask, options=options), inputs[:2]


def held():
    """Every panel that any cache of this process holds."""
    caches = [x for x in gc.get_objects() if type(x) is LogitsCache]
    return [panel for cache in caches for panel in cache._panels.values()]


@each_kernel
@every_dtype
@pytest.mark.parametrize(
    "options", [AUTO_OPTIONS, replace(UNCACHED, cache_bytes=1 << 30)], ids=["auto", "all"]
)
def test_no_bit_of_a_gradient_depends_on_the_cache(options, dtype, kernel):
    def gradients(of):
        outputs, leaves = of_2048_words(kernel, of, dtype)
        wave = torch.sin(torch.arange(1.0, TOKENS + 1)).view(TOKENS, 1)
        return torch.autograd.grad(sum((x.flatten(1) * wave).sum() for x in outputs), leaves)

    expected = gradients(UNCACHED)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients(options), expected, strict=True))


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "half of the rows"])
@every_dtype
def test_auto_keeps_panels_of_one_byte_for_each_logit_of_the_trained_rows(dtype, masked):
    outputs, _ = of_2048_words(at_targets, AUTO_OPTIONS, dtype, ODD if masked else None)
    rows = TOKENS // 2 if masked else TOKENS
    assert sum(panel.untyped_storage().nbytes() for panel in held()) == rows * 2048
    assert {tuple(panel.shape) for panel in held()} == {(rows, 256)}
    del outputs
    assert held() == []


@pytest.mark.parametrize(
    ("keys", "panels"),
    [({"cache_bytes": 3 * TOKENS * 256 * 2}, 3), ({"chunk_size": 4}, 0)],
    ids=["below its limit", "never the only panel"],
)
def test_auto_keeps_so_many_panels(keys, panels):
    outputs, _ = of_2048_words(at_targets, replace(AUTO_OPTIONS, **keys), torch.bfloat16)
    assert len(held()) == panels
    del outputs


def test_a_backward_gives_the_memory_back_and_leaves_a_second_one_its_bits():
    outputs, leaves = of_2048_words(at_targets, AUTO_OPTIONS, torch.float32)
    first = torch.autograd.grad(outputs[0].sum(), leaves, retain_graph=True)
    assert held() == []
    second = torch.autograd.grad(outputs[0].sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_gradient_are_left_out_without_a_copy_of_the_panel():
    options = LinearLogprobsOptions(chunk_size=4, cache_bytes=1 << 30)
    outputs, leaves = of_2048_words(at_targets, options, torch.float32)
    with Recorder() as seen:
        torch.autograd.grad(outputs[0], leaves, (torch.arange(TOKENS).view(TOKENS, 1) % 8).clamp(max=1.0))
    assert max(shape.numel() for shape in seen.new if shape[-1:] == (2048,)) == 4 * 2048


# Accumulation into main_grad, as ColumnParallelLinear with gradient_accumulation_fusion leaves it for Megatron's hook


INTO_MAIN_GRAD = LinearLogprobsOptions(accumulate_main_grad=True)


@pytest.mark.each_value
@each_tiling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize(("kernel", "k"), [(alone, 1), (at_ids, 4)], ids=["targets", "ids"])
def test_main_grad_is_added_to_and_the_hook_is_told(tiling, dtype, zero_out, kernel, k):
    plain = head(dtype, k=k)
    backward(kernel, plain, tiling)
    hidden, weight, ids = head(dtype, k=k)
    weight.main_grad = torch.full(weight.shape, 2.0)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    for _ in range(2):
        hidden.grad = weight.grad = None
        backward(kernel, (hidden, weight, ids), replace(tiling, accumulate_main_grad=True, vocab_size=WORDS))
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == dtype
    assert not zero_out or not weight.grad.any()
    assert torch.equal(hidden.grad, plain[0].grad)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight.main_grad, 2 + 2 * plain[1].grad.float(), rtol=rounding, atol=rounding)


def test_main_grad_without_megatrons_flag_gives_autograd_nothing():
    hidden, weight, ids = head()
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    backward(alone, (hidden, weight, ids), INTO_MAIN_GRAD)
    assert weight.grad is None
    assert weight.main_grad.any()


def test_main_grad_of_padded_rows_and_of_no_rows():
    hidden, weight, ids = head()
    weight.main_grad = torch.zeros_like(weight)
    options = replace(INTO_MAIN_GRAD, vocab_size=600)
    backward(alone, (hidden, weight, ids % 600), options)
    assert weight.main_grad[:600].any(1).all()
    assert not weight.main_grad[600:].any()
    before = weight.main_grad.clone()
    alone(hidden, weight, ids % 600, mask=torch.zeros(ROWS, 1), options=options)[0].backward(GRAD)
    assert torch.equal(weight.main_grad, before)


def test_a_weight_without_main_grad_is_refused_unless_frozen():
    hidden, weight, ids = head()
    with pytest.raises(ValueError, match="main_grad"):
        alone(hidden, weight, ids, options=INTO_MAIN_GRAD)
    backward(alone, (hidden, weight.detach(), ids), INTO_MAIN_GRAD)
    assert hidden.grad is not None


# The frozen head


@pytest.mark.each_value
@each_tiling
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_frozen_head(tiling, with_entropy, masked, dtype, tolerance):
    """Large logits in the last panel make the running sum rescale what the first panels left."""
    hidden, weight, ids = (x.detach() for x in head())
    weight = weight * torch.linspace(0.3, 3, WORDS).unsqueeze(1)
    sparse = torch.where(torch.arange(ROWS).view(ROWS, 1) % 3 == 0, 0.0, GRAD)
    kwargs = {
        "temperature": 0.7,
        "with_entropy": with_entropy,
        "mask": torch.arange(ROWS).view(ROWS, 1) % 4 if masked else None,
        "options": replace(tiling, vocab_size=650, logit_scale=0.8),
    }
    results = []
    for function, precision in ((linear_logprobs, torch.float64), (fused_linear_logprobs, dtype)):
        leaf = hidden.to(precision).requires_grad_()
        out = function(leaf, weight.to(precision), ids[..., 0] % 650, **kwargs)
        outputs = out if with_entropy else (out,)
        sum((x * sparse).sum() for x in outputs).backward()
        results.append([*(x.detach() for x in outputs), leaf.grad])
    (*expected, expected_grad), (*actual, grad) = results
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=0, atol=10 * tolerance)
    assert float((grad - expected_grad).norm() / expected_grad.norm()) <= tolerance


def test_frozen_head_saves_the_direction_alone():
    hidden, weight, ids = head()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        alone(hidden, weight.detach(), ids)
    assert [x.shape for x in saved] == [(ROWS, HIDDEN)]


def test_frozen_head_in_16_bit_is_no_worse_than_unfused():
    noise = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(*of, HIDDEN, generator=noise).bfloat16() for of in ((ROWS, 1), (512,)))
    targets = torch.randint(0, 512, (ROWS, 1), generator=noise)
    grads = {}
    for name, function, dtype in (
        ("exact", linear_logprobs, torch.float64),
        ("unfused", linear_logprobs, torch.bfloat16),
        ("fused", fused_linear_logprobs, torch.bfloat16),
    ):
        leaf = hidden.detach().to(dtype).requires_grad_()
        function(leaf, weight.to(dtype), targets).backward(GRAD)
        grads[name] = leaf.grad.double()
    errors = {name: float((grad - grads["exact"]).norm()) for name, grad in grads.items()}
    assert 0 < errors["fused"] <= 1.1 * errors["unfused"]
