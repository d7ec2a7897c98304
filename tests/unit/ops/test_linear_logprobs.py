"""The fused kernel against its plain twin in float64, over its options and the edges of its inputs."""

import math
from dataclasses import replace

import pytest
import torch
from distributed.plain_ops import linear_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import (
    LinearLogprobsOptions,
    fused_linear_logprobs,
)

TILINGS = {
    "default": LinearLogprobsOptions(),
    "one row": LinearLogprobsOptions(chunk_bytes=1),
    "three rows": LinearLogprobsOptions(chunk_size=3),
    "two panels": LinearLogprobsOptions(chunk_bytes=4 * 256 * 5),
    "cached panels": LinearLogprobsOptions(chunk_bytes=4 * 256 * 5, cache_bytes=1 << 30),
}


def problem(seq: int, batch: int, hidden: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(seq, batch, hidden, dtype=torch.float64, generator=noise)
    weight_VH = torch.randn(vocab, hidden, dtype=torch.float64, generator=noise) * (2 / math.sqrt(hidden))
    return hidden_SBH, weight_VH, torch.randint(0, vocab, (seq, batch), generator=noise)


def evaluate(function, inputs, dtype=torch.float64, **kwargs) -> dict[str, Tensor]:
    """Results and gradients under a fixed weighting of the outputs; a third of the rows gets no gradient."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs[:2])
    out = function(hidden, weight, inputs[2], **kwargs)
    outputs = out if isinstance(out, tuple) else (out,)
    loss = torch.zeros((), dtype=outputs[0].dtype)
    for output, phase in zip(outputs, (0.3, 1.7), strict=False):
        step = torch.arange(output.numel(), dtype=output.dtype).view_as(output)
        loss = loss + (torch.where(step % 3 == 1, 0.0, torch.sin(step + phase)) * output).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    names = ("logprobs", "entropy")[: len(outputs)]
    return {
        **dict(zip(names, (x.detach() for x in outputs), strict=True)),
        "hidden": grads[0],
        "weight": grads[1],
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300))


def assert_matches(
    actual: dict[str, Tensor], expected: dict[str, Tensor], outputs: float, grads: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if name in ("hidden", "weight"):
            assert relative(value, expected[name]) <= grads, name
        else:
            torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=outputs, msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_float32_matches_float64(tiling, with_entropy, temperature, masked):
    inputs = problem(7, 3, 24, 500)
    kwargs = {
        "temperature": temperature,
        "with_entropy": with_entropy,
        "mask": torch.arange(21).view(7, 3) % 4 > 0 if masked else None,
        "options": replace(TILINGS[tiling], logit_scale=0.8),
    }
    inputs[0].copy_(inputs[0].float())
    inputs[1].copy_(inputs[1].float())
    expected = evaluate(linear_logprobs, inputs, **kwargs)
    actual = evaluate(fused_linear_logprobs, inputs, torch.float32, **kwargs)
    assert actual["logprobs"].dtype == torch.float32
    assert_matches(actual, expected, outputs=1e-5, grads=1e-6)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_tiling(data: st.DataObject):
    seq, batch, hidden = (data.draw(st.integers(1, 6)) for _ in range(3))
    vocab = data.draw(st.sampled_from([1, 2, 5, 256, 257, 600]))
    real = data.draw(st.integers(1, vocab))
    hidden_SBH, weight_VH, targets = problem(seq, batch, hidden, vocab, data.draw(st.integers(0, 99)))
    bits = data.draw(st.none() | st.lists(st.booleans(), min_size=seq * batch, max_size=seq * batch))
    options = LinearLogprobsOptions(
        chunk_bytes=data.draw(st.sampled_from([1, 8 * 256 * 3, 64 << 20])),
        chunk_size=data.draw(st.none() | st.integers(1, 40)),
        vocab_size=real,
        logit_scale=data.draw(st.floats(0.2, 3)),
    )
    kwargs = {
        "temperature": data.draw(st.floats(0.3, 2)),
        "mask": None if bits is None else torch.tensor(bits).view(seq, batch),
        "with_entropy": data.draw(st.booleans()),
        "options": options,
    }
    inputs = (hidden_SBH, weight_VH, targets % real)
    actual, expected = (
        evaluate(fused_linear_logprobs, inputs, **kwargs),
        evaluate(linear_logprobs, inputs, **kwargs),
    )
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-11, msg=name)


def test_double_backward_is_refused():
    hidden, weight, targets = problem(2, 1, 4, 5)
    hidden.requires_grad_()
    loss = fused_linear_logprobs(hidden, weight, targets).square().sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_rows_at_all():
    hidden, weight, targets = problem(0, 2, 6, 40)
    hidden.requires_grad_()
    weight.requires_grad_()
    out = fused_linear_logprobs(hidden, weight, targets)
    grads = torch.autograd.grad(out.sum(), (hidden, weight))
    assert out.shape == (0, 2)
    assert grads[0].shape == (0, 2, 6)
    assert not grads[1].any()


def test_what_is_masked_is_never_read():
    """NaN hidden states and targets outside the vocabulary are harmless where the mask is zero."""
    hidden, weight, targets = problem(4, 2, 6, 40)
    mask = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1]])
    clean = evaluate(fused_linear_logprobs, (hidden, weight, targets), mask=mask, with_entropy=True)
    hidden[mask == 0] = math.nan
    targets[mask == 0] = -100
    dirty = evaluate(fused_linear_logprobs, (hidden, weight, targets), mask=mask, with_entropy=True)
    for name, value in dirty.items():
        assert torch.equal(value, clean[name]), name


def test_a_nan_gradient_is_not_swallowed():
    hidden, weight, targets = problem(4, 1, 6, 40)
    weight.requires_grad_()
    out = fused_linear_logprobs(hidden, weight, targets)
    (grad,) = torch.autograd.grad(out, weight, torch.tensor([[0.0], [math.nan], [0.0], [0.0]]).double())
    assert bool(grad.isnan().all())


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_near_120(sign):
    """Integer inputs make the logits exact in float32, so only the softmax's own rounding is seen."""
    noise = torch.Generator().manual_seed(3)
    hidden = torch.randint(0, 6, (16, 2, 4), generator=noise).double() * sign
    weight = torch.randint(3, 7, (300, 4), generator=noise).double()
    hidden[0] = 5 * sign
    weight[0] = 6
    assert float((hidden @ weight.t()).abs().max()) == 120
    targets = torch.randint(0, 300, (16, 2), generator=noise)
    expected = evaluate(linear_logprobs, (hidden, weight, targets), with_entropy=True)
    for options in TILINGS.values():
        actual = evaluate(
            fused_linear_logprobs,
            (hidden, weight, targets),
            torch.float32,
            with_entropy=True,
            options=options,
        )
        assert bool(actual["logprobs"].isfinite().all())
        # The rounding of a log-sum-exp near 128 is 7.6e-6; p carries it into the gradient.
        assert_matches(actual, expected, outputs=1.6e-5, grads=2e-5)


def test_non_contiguous_inputs():
    hidden, weight, targets = problem(6, 4, 8, 50)
    strided = (
        hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight.t().contiguous().t(),
        targets.t().contiguous().t(),
    )
    mask = (torch.arange(24).view(4, 6) % 3 > 0).t()
    assert not any(x.is_contiguous() for x in (*strided, mask))
    out = fused_linear_logprobs(*strided, mask=mask)
    assert torch.equal(out, fused_linear_logprobs(hidden, weight, targets, mask=mask.contiguous()))
    hidden, weight = (x.detach().requires_grad_() for x in strided[:2])
    expanded = torch.autograd.grad(fused_linear_logprobs(hidden, weight, strided[2]).sum(), (hidden, weight))
    expected = torch.autograd.grad(linear_logprobs(hidden, weight, strided[2]).sum(), (hidden, weight))
    torch.testing.assert_close(expanded, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"mask": torch.ones(3, 3)}, "mask"),
        ({"weight_VH": torch.zeros(40, 5, dtype=torch.float64)}, "weight"),
        ({"weight_VH": torch.zeros(40, 6)}, "dtype|float32"),
        ({"targets_SB": torch.zeros(4, 2, dtype=torch.long)}, "targets"),
        ({"targets_SB": torch.full((5, 2), 40)}, "target 40 is outside"),
        ({"targets_SB": torch.full((5, 2), -100)}, "target -100 is outside"),
        ({"options": LinearLogprobsOptions(vocab_size=41)}, "vocab_size is 41"),
    ],
)
def test_mistakes_are_named(change, message):
    hidden, weight, targets = problem(5, 2, 6, 40)
    call = {"hidden_SBH": hidden, "weight_VH": weight, "targets_SB": targets}
    with pytest.raises(ValueError, match=message):
        fused_linear_logprobs(**(call | change))


@pytest.mark.parametrize("bad", [{"chunk_bytes": 0}, {"chunk_size": 0}])
def test_options_must_be_positive(bad):
    with pytest.raises(ValueError, match="must be positive"):
        LinearLogprobsOptions(**bad)
