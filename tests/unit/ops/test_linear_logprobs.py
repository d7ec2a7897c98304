"""The fused kernels, of one target and of K ids a token, against a float64 log_softmax over all the logits."""

import math
from typing import NamedTuple

import pytest
import torch
from distributed.plain_ops import linear_logprobs, plain_linear_logprobs_at
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at

TILINGS = {
    "default": LinearLogprobsOptions(),
    "one row": LinearLogprobsOptions(chunk_bytes=1),
    "three rows": LinearLogprobsOptions(chunk_size=3),
    "panels": LinearLogprobsOptions(chunk_bytes=4 * 256 * 5),
    "cached panels": LinearLogprobsOptions(chunk_bytes=4 * 256 * 5, cache_bytes=1 << 20),
}
TAIL, ENTROPY = {"with_tail": True}, {"with_entropy": True}
NAMES = ("logprobs", "tail_logmass", "entropy")


class Outputs(NamedTuple):
    """A kernel's outputs; None for those that are not asked for."""

    logprobs: Tensor
    tail_logmass: Tensor | None = None
    entropy: Tensor | None = None


def at_targets(hidden_SBH, weight_VH, ids_SBK, *, with_entropy=False, **keys):
    """`fused_linear_logprobs` in the form of `linear_logprobs_at` with K = 1."""
    out = fused_linear_logprobs(hidden_SBH, weight_VH, ids_SBK[..., 0], with_entropy=with_entropy, **keys)
    logprobs, entropy = out if with_entropy else (out, None)
    return Outputs(logprobs.unsqueeze(-1), None, entropy)


def at_ids(*inputs, **keys):
    return Outputs(*linear_logprobs_at(*inputs, **keys))


def plain(hidden_SBH, weight_VH, ids_SBK, *, with_entropy=False, **keys):
    """The twin of both over all the logits."""
    entropy = None
    if with_entropy:
        _, entropy = linear_logprobs(hidden_SBH, weight_VH, ids_SBK[..., 0], with_entropy=True, **keys)
    return Outputs(*plain_linear_logprobs_at(hidden_SBH, weight_VH, ids_SBK, **keys), entropy)


KERNELS = {"targets": (at_targets, 1, ENTROPY), "ids": (at_ids, 3, TAIL)}
"""Each with a number of ids and all the outputs that it has."""
each_kernel = pytest.mark.parametrize(("kernel", "k", "outputs"), KERNELS.values(), ids=KERNELS)


def problem(seq, batch, hidden, vocab, k, seed=0, real=None):
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(seq, batch, hidden, dtype=torch.float64, generator=noise)
    weight_VH = torch.randn(vocab, hidden, dtype=torch.float64, generator=noise) * (2 / math.sqrt(hidden))
    ids_SBK = torch.rand(seq, batch, real or vocab, generator=noise).argsort(-1)[..., :k]
    return hidden_SBH, weight_VH, ids_SBK


def evaluate(function, inputs, dtype=torch.float64, **kwargs):
    """Results and gradients under a fixed weighting of the outputs; a third of the tokens gets no gradient."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], **kwargs)
    results = {name: x for name, x in zip(NAMES, out, strict=True) if x is not None}
    loss = torch.zeros((), dtype=out.logprobs.dtype)
    for phase, output in enumerate(results.values()):
        wave = torch.sin(torch.arange(output.numel(), dtype=output.dtype) + phase).view_as(output)
        tokens = torch.arange(out.logprobs[..., 0].numel()).view(inputs[2].shape[:-1])
        live = (tokens % 3 != 1).view(*tokens.shape, *[1] * (output.dim() - tokens.dim()))
        loss = loss + torch.where(live & output.isfinite(), wave * output, 0.0).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {name: x.detach() for name, x in results.items()} | {"hidden": grads[0], "weight": grads[1]}


def assert_matches(actual, expected, outputs, grads):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if name in NAMES:
            torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=outputs, msg=name)
        else:
            error = (value.double() - expected[name]).norm() / expected[name].norm().clamp_min(1e-300)
            assert error <= grads, (name, float(error))


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_tiling(name, data):
    kernel, _, has = KERNELS[name]
    seq, batch, hidden = (data.draw(st.integers(1, 6)) for _ in range(3))
    vocab = data.draw(st.sampled_from([1, 2, 5, 256, 257, 600]))
    real = data.draw(st.integers(1, vocab))
    k = 1 if name == "targets" else data.draw(st.sampled_from([1, min(3, real), max(1, real - 1), real]))
    inputs = problem(seq, batch, hidden, vocab, k, data.draw(st.integers(0, 99)), real)
    bits = data.draw(st.none() | st.lists(st.booleans(), min_size=seq * batch, max_size=seq * batch))
    kwargs = {output: data.draw(st.booleans()) for output in has} | {
        "temperature": data.draw(st.floats(0.3, 2)),
        "mask": None if bits is None else torch.tensor(bits).view(seq, batch),
        "options": LinearLogprobsOptions(
            chunk_bytes=data.draw(st.sampled_from([1, 8 * 256 * 3, 64 << 20])),
            chunk_size=data.draw(st.none() | st.integers(1, 40)),
            vocab_size=real,
            logit_scale=data.draw(st.floats(0.2, 3)),
            cache_bytes=data.draw(st.sampled_from([0, 1 << 20])),
        ),
    }
    actual = evaluate(kernel, inputs, **kwargs)
    expected = evaluate(plain, inputs, **kwargs)
    for output, value in actual.items():
        torch.testing.assert_close(value, expected[output], rtol=1e-10, atol=1e-11, msg=output)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ids_leave_an_empty_tail(tiling, dtype):
    """The tail is the constant -inf: whatever the loss does with it adds nothing to the gradients, nor a NaN."""
    hidden, weight, ids = (x.to(dtype) if x.is_floating_point() else x for x in problem(4, 2, 6, 300, 300))
    grads = []
    for with_tail in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprobs_at(*leaves, ids, with_tail=with_tail, options=TILINGS[tiling])
        loss = (out.logprobs[..., :7].exp() * out.logprobs[..., :7]).sum()
        if out.tail_logmass is not None:
            assert bool((out.tail_logmass == -math.inf).all())
            loss = loss + ((out.tail_logmass.exp() - 1) * out.tail_logmass).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for without, with_tail in zip(*grads, strict=True):
        assert torch.equal(without, with_tail)
        assert bool(without.isfinite().all())


@pytest.mark.each_value
@pytest.mark.parametrize("gap", [34.0, 100.0, 236.0], ids="gap {}".format)
@pytest.mark.parametrize("tiling", TILINGS)
def test_a_tail_of_tiny_mass_is_exact(gap, tiling):
    """Of mass 1e-12, and of masses whose reciprocal float32 cannot hold, with logits up to 119 either way."""
    noise = torch.Generator().manual_seed(2)
    # The logits are the hidden states: three near gap / 2, 297 near -gap / 2; exact in float32.
    logits = torch.randint(-8, 9, (5, 2, 300), generator=noise).double() / 8 - gap / 2
    logits[..., [4, 150, 299]] += gap
    inputs = logits, torch.eye(300, dtype=torch.float64), torch.tensor([150, 299, 4]).expand(5, 2, 3).clone()
    kwargs = {"with_tail": True, "options": TILINGS[tiling]}
    expected = evaluate(plain, inputs, **kwargs)
    assert float(expected["tail_logmass"].max()) < 6 - gap
    for dtype, outputs, grads in ((torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6)):
        actual = evaluate(at_ids, inputs, dtype, **kwargs)
        for name in NAMES:
            if name in actual:
                torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-7, atol=outputs)
        assert_matches({n: actual[n] for n in ("hidden", "weight")},
                       {n: expected[n] for n in ("hidden", "weight")}, 0, grads)  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("kernel", "k", "asked", "outputs", "grads"),
    [
        # The rounding of a log-sum-exp near 128 is 7.6e-6; p carries it into the gradient.
        (at_targets, 1, ENTROPY, 1.6e-5, 2e-5),
        # The plain twin in float32 errs by 2e-6 too: the weight rows are alike, and their sum cancels.
        (at_ids, 9, TAIL, 1e-5, 4e-6),
    ],
)
def test_logits_near_120(sign, kernel, k, asked, outputs, grads):
    """Integer inputs make the logits exact in float32, so only the softmax's own rounding is seen."""
    noise = torch.Generator().manual_seed(3)
    hidden = torch.randint(0, 6, (16, 2, 4), generator=noise).double() * sign
    weight = torch.randint(3, 7, (300, 4), generator=noise).double()
    hidden[0], weight[0] = 5 * sign, 6
    assert float((hidden @ weight.t()).abs().max()) == 120
    inputs = hidden, weight, torch.rand(16, 2, 300, generator=noise).argsort(-1)[..., :k]
    expected = evaluate(plain, inputs, **asked)
    for options in TILINGS.values():
        actual = evaluate(kernel, inputs, torch.float32, options=options, **asked)
        assert_matches(actual, expected, outputs, grads)


@each_kernel
def test_no_rows_at_all(kernel, k, outputs):
    hidden, weight, ids = problem(0, 2, 6, 40, k)
    hidden.requires_grad_()
    weight.requires_grad_()
    out = kernel(hidden, weight, ids, **outputs)
    grads = torch.autograd.grad(out.logprobs.sum(), (hidden, weight))
    assert out.logprobs.shape == (0, 2, k)
    assert {x.shape for x in out[1:] if x is not None} == {(0, 2)}
    assert grads[0].shape == (0, 2, 6)
    assert not grads[1].any()


@each_kernel
def test_masked_tokens_are_never_read(kernel, k, outputs):
    """NaN hidden states, ids outside the vocabulary and repeated ones are harmless where the mask is zero."""
    hidden, weight, ids = problem(4, 2, 6, 40, k)
    mask = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1]])
    clean = evaluate(kernel, (hidden, weight, ids), mask=mask, **outputs)
    hidden[mask == 0] = math.nan
    ids[mask == 0] = -100
    dirty = evaluate(kernel, (hidden, weight, ids), mask=mask, **outputs)
    for name, value in dirty.items():
        assert torch.equal(value, clean[name]), name


@pytest.mark.parametrize(("name", "output"), [("targets", 0), ("targets", 2), ("ids", 0), ("ids", 1)])
def test_a_nan_gradient_is_not_swallowed(name, output):
    kernel, k, outputs = KERNELS[name]
    hidden, weight, ids = problem(4, 1, 6, 40, k)
    weight.requires_grad_()
    out = kernel(hidden, weight, ids, **outputs)[output]
    grad_out = torch.zeros_like(out)
    grad_out[1] = math.nan
    (grad,) = torch.autograd.grad(out, weight, grad_out)
    assert bool(grad.isnan().all())


@each_kernel
def test_double_backward_is_refused(kernel, k, outputs):
    hidden, weight, ids = problem(2, 1, 4, 5, k)
    hidden.requires_grad_()
    loss = kernel(hidden, weight, ids, **outputs).logprobs.square().sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@each_kernel
def test_non_contiguous_inputs_and_narrow_ids(kernel, k, outputs):
    hidden, weight, ids = problem(6, 4, 8, 50, 3)
    mask = (torch.arange(24).view(4, 6) % 3 > 0).t()
    strided = (
        hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight.t().contiguous().t(),
        ids.transpose(0, 2).contiguous().transpose(0, 2).int()[..., :k],
    )
    assert not any(x.is_contiguous() for x in (*strided[:2], mask))
    expected = evaluate(kernel, (hidden, weight, ids[..., :k]), mask=mask.contiguous(), **outputs)
    for name, value in evaluate(kernel, strided, mask=mask, **outputs).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


BOTH = [
    ({"temperature": 0.0}, "temperature"),
    ({"mask": torch.ones(3, 3)}, "mask .* shape .5, 2. of the tokens"),
    ({"weight_VH": torch.zeros(40, 5, dtype=torch.float64)}, "weight"),
    ({"weight_VH": torch.zeros(40, 6)}, "float32"),
    ({"options": LinearLogprobsOptions(vocab_size=41)}, "vocab_size is 41"),
    ({"options": LinearLogprobsOptions(logit_scale=-1.0)}, "logit_scale must be positive"),
    ({"options": LinearLogprobsOptions(accumulate_main_grad=True)}, "main_grad"),
]
OF_TARGETS = [
    ({"targets_SB": torch.zeros(4, 2, dtype=torch.long)}, "targets"),
    ({"targets_SB": torch.full((5, 2), 40)}, "target 40 is outside"),
]
OF_IDS = [
    ({"indices_SBK": torch.zeros(4, 2, 3, dtype=torch.long)}, "indices .* .4, 2. must have the shape .5, 2."),
    ({"indices_SBK": torch.zeros(5, 2, 0, dtype=torch.long)}, "K > 0"),
    ({"indices_SBK": torch.zeros(5, 2, 3)}, "torch.float32 are not ids"),
    ({"indices_SBK": torch.tensor([1, 2, 40]).expand(5, 2, 3)}, "index 40 is outside"),
    ({"indices_SBK": torch.tensor([7, 3, 7]).expand(5, 2, 3)}, "index 7 is given twice"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("targets", *case) for case in BOTH + OF_TARGETS] + [("ids", *case) for case in BOTH + OF_IDS],
)
def test_mistakes_are_named(name, change, message):
    hidden, weight, ids = problem(5, 2, 6, 40, 3)
    call = {"hidden_SBH": hidden, "weight_VH": weight.requires_grad_()} | (
        {"targets_SB": ids[..., 0]} if name == "targets" else {"indices_SBK": ids}
    )
    with pytest.raises(ValueError, match=message):
        (fused_linear_logprobs if name == "targets" else linear_logprobs_at)(**(call | change))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"cache_bytes_per_logit": -1}, "cache_bytes_per_logit"),
    ],
)
def test_options_that_mean_nothing_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        LinearLogprobsOptions(**bad)
