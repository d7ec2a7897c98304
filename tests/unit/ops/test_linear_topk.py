"""The k largest log-probabilities against a sort of all the logits in float64, and with the student's kernel."""

import math

import pytest
import torch
from distributed.plain_ops import plain_linear_topk_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import Recorder

from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.ops.linear_topk import linear_topk_logprobs

TILINGS = {
    "default": LinearLogprobsOptions(),
    "one row": LinearLogprobsOptions(chunk_bytes=1),
    "three rows": LinearLogprobsOptions(chunk_size=3),
    "panels": LinearLogprobsOptions(chunk_bytes=4 * 256 * 5),
}
FLOATS = ("logits", "logsumexp", "tail_logmass", "logprobs")


def problem(seq, batch, hidden, vocab, seed=0):
    noise = torch.Generator().manual_seed(seed)
    hidden_SBH = torch.randn(seq, batch, hidden, dtype=torch.float64, generator=noise)
    return hidden_SBH, torch.randn(vocab, hidden, dtype=torch.float64, generator=noise) * (
        2 / math.sqrt(hidden)
    )


def assert_matches(actual, expected, tolerance):
    assert torch.equal(actual.indices, expected.indices)
    for name in FLOATS:
        value, reference = getattr(actual, name), getattr(expected, name)
        assert (value is None) == (reference is None), name
        if value is not None:
            torch.testing.assert_close(value.double(), reference, rtol=0, atol=tolerance, msg=name)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_tiling(data):
    seq, batch, hidden = (data.draw(st.integers(1, 6)) for _ in range(3))
    vocab = data.draw(st.sampled_from([1, 2, 5, 256, 257, 600]))
    real = data.draw(st.integers(1, vocab))
    k = data.draw(st.sampled_from([1, min(3, real), max(1, real - 1), real]))
    inputs = problem(seq, batch, hidden, vocab, data.draw(st.integers(0, 99)))
    bits = data.draw(st.none() | st.lists(st.booleans(), min_size=seq * batch, max_size=seq * batch))
    kwargs = {
        "temperature": data.draw(st.floats(0.3, 2)),
        "mask": None if bits is None else torch.tensor(bits).view(seq, batch),
        "options": LinearLogprobsOptions(
            chunk_bytes=data.draw(st.sampled_from([1, 8 * 256 * 3, 64 << 20])),
            chunk_size=data.draw(st.none() | st.integers(1, 40)),
            vocab_size=real,
            logit_scale=data.draw(st.floats(0.2, 3)),
        ),
    }
    actual, expected = (f(*inputs, k, **kwargs) for f in (linear_topk_logprobs, plain_linear_topk_logprobs))
    assert_matches(actual, expected, 1e-11)


@pytest.mark.each_value
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ties_take_any_of_the_equal_ids_once(tiling, dtype):
    noise = torch.Generator().manual_seed(3)
    hidden = torch.randint(-1, 2, (6, 2, 4), generator=noise).to(dtype)
    weight = torch.randint(-1, 2, (600, 4), generator=noise).to(dtype)
    actual = linear_topk_logprobs(hidden, weight, 50, options=TILINGS[tiling])
    expected = plain_linear_topk_logprobs(hidden.double(), weight.double(), 50)
    assert torch.equal(actual.logits.double(), expected.logits)
    torch.testing.assert_close(actual.tail_logmass.double(), expected.tail_logmass, rtol=0, atol=2e-6)
    logits = (hidden @ weight.t()).to(actual.logits.dtype)
    assert torch.equal(logits.gather(-1, actual.indices), actual.logits)
    ids = actual.indices.sort(-1).values
    assert bool((ids[..., 1:] != ids[..., :-1]).all())


@pytest.mark.each_value
@pytest.mark.parametrize("gap", [34.0, 236.0])
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_tail_of_tiny_mass_is_exact(gap, tiling, dtype):
    """Of mass 1e-12, and of one that float32 cannot hold, with logits up to 119 either way."""
    noise = torch.Generator().manual_seed(2)
    logits = torch.randint(-8, 9, (5, 2, 300), generator=noise).double() / 8 - gap / 2
    logits[..., [4, 150, 299]] += gap + torch.tensor([0.0, 4.0, 8.0], dtype=torch.float64)
    eye = torch.eye(300, dtype=torch.float64)
    expected = plain_linear_topk_logprobs(logits, eye, 3)
    actual = linear_topk_logprobs(logits.to(dtype), eye.to(dtype), 3, options=TILINGS[tiling])
    assert float(expected.tail_logmass.max()) < 6 - gap
    assert torch.equal(actual.indices, expected.indices)
    torch.testing.assert_close(actual.tail_logmass.double(), expected.tail_logmass, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("tiling", TILINGS)
def test_the_whole_vocabulary_leaves_an_empty_tail(tiling):
    out = linear_topk_logprobs(*problem(3, 2, 6, 300), 300, options=TILINGS[tiling])
    assert bool((out.tail_logmass == -math.inf).all())
    torch.testing.assert_close(out.logprobs.exp().sum(-1), torch.ones(3, 2, dtype=torch.float64))


def test_16_bit_error_is_no_worse_than_unfused():
    hidden, weight = (x.bfloat16() for x in problem(64, 2, 32, 2000))
    exact = plain_linear_topk_logprobs(hidden.double(), weight.double(), 10)
    errors = {}
    for function in (linear_topk_logprobs, plain_linear_topk_logprobs):
        out = function(hidden, weight, 10)
        errors[function] = [float((getattr(out, x) - getattr(exact, x)).norm()) for x in FLOATS]
    fused, plain = errors[linear_topk_logprobs], errors[plain_linear_topk_logprobs]
    assert all(f <= 1.02 * p for f, p in zip(fused, plain, strict=True)), errors


@pytest.mark.parametrize("kept", [[], [4]], ids=["no row", "a single row"])
def test_nearly_empty_masks(kept):
    hidden, weight = problem(5, 2, 6, 40)
    mask = torch.zeros(10, dtype=torch.bool)
    mask[kept] = True
    expected = plain_linear_topk_logprobs(hidden, weight, 3, mask=mask.view(5, 2))
    hidden.view(10, 6)[~mask] = math.nan
    actual = linear_topk_logprobs(hidden, weight, 3, mask=mask.view(5, 2))
    assert_matches(actual, expected, 1e-12)
    for name in (*FLOATS, "indices"):
        assert not getattr(actual, name).flatten(0, 1)[~mask].any(), name


def test_no_rows_at_all():
    out = linear_topk_logprobs(*problem(0, 2, 6, 40), 3)
    assert out.logprobs.shape == out.indices.shape == (0, 2, 3)
    assert out.tail_logmass.shape == (0, 2)


def test_holds_neither_gradients_nor_all_logits():
    tokens, vocab = 512, 4096
    hidden, weight = (x.float().requires_grad_() for x in problem(tokens, 1, 16, vocab))
    with Recorder() as seen:
        out = linear_topk_logprobs(hidden, weight, 8, options=LinearLogprobsOptions(chunk_bytes=64 << 10))
    assert not any(getattr(out, name).requires_grad for name in FLOATS)
    assert seen.largest <= vocab * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0, but must lie between 1 and the vocabulary size 40"),
        ({"k": 41}, "k is 41"),
        ({"k": 31, "options": LinearLogprobsOptions(vocab_size=30)}, "vocabulary size 30"),
    ],
)
def test_mistakes_are_named(change, message):
    hidden, weight = problem(5, 2, 6, 40)
    with pytest.raises(ValueError, match=message):
        linear_topk_logprobs(**({"hidden_SBH": hidden, "weight_VH": weight, "k": 3} | change))
