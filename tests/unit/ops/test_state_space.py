"""The scan and the convolution of Mamba-2 layers equal loops over positions; samples know nothing of others."""

from itertools import pairwise

import pytest
import torch

from nemo_rl_mcore.ops.state_space import ScanInputs, causal_convolution, selective_scan

ROWS, HEADS, SIZE, GROUPS, STATE, TAPS = 2, 6, 3, 2, 5, 4


def scanned_one_by_one(values, log_decays, keys, queries, samples, state, strengths=None):
    read = []
    for at in range(values.shape[1]):
        if at and samples is not None and samples[at] != samples[at - 1]:
            state = torch.zeros_like(state)
        key, query = (x[:, at].repeat_interleave(HEADS // GROUPS, 1) for x in (keys, queries))
        decayed = log_decays[:, at].exp()[..., None, None] * state
        written = values[:, at]
        if strengths is not None:  # the delta rule
            written = strengths[:, at, :, None] * (written - (decayed * key[:, :, None, :]).sum(-1))
        state = decayed + written[..., None] * key[:, :, None, :]
        read.append((state * query[:, :, None, :]).sum(-1))
    return torch.stack(read, 1), state


def inputs(columns, dtype=torch.float64):
    generator = torch.Generator().manual_seed(columns)

    def draw(*shape):
        return torch.randn(ROWS, columns, *shape, generator=generator, dtype=torch.float64).to(dtype)

    found = draw(HEADS, SIZE), -draw(HEADS).abs(), draw(GROUPS, STATE), draw(GROUPS, STATE)
    state = torch.randn(ROWS, HEADS, SIZE, STATE, generator=generator, dtype=torch.float64).to(dtype)
    return [x.requires_grad_() for x in (*found, state)]


def samples_of(columns, borders):
    """Which sample each position is of, where others begin at these positions."""
    return None if borders is None else (torch.arange(columns)[:, None] >= torch.tensor(borders)).sum(1)


@pytest.mark.parametrize(
    ("columns", "borders"),
    [
        (1, None),
        (5, None),
        (64, None),
        (65, None),
        (150, None),
        (150, [64]),
        (150, [1, 63, 65, 127, 128, 149]),
        (9, [4]),
    ],
)
@pytest.mark.parametrize("delta", [False, True])
def test_a_scan_by_chunks_is_one_position_by_position(columns, borders, delta):
    values, log_decays, keys, queries, state = given = inputs(columns)
    strengths = None
    if delta:
        keys = torch.nn.functional.normalize(keys.detach(), dim=-1).requires_grad_()
        strengths = torch.rand(ROWS, columns, HEADS, dtype=torch.float64, requires_grad=True)
        given = [values, log_decays, keys, queries, state, strengths]
    samples = samples_of(columns, borders)
    weights = torch.randn(ROWS, columns, HEADS, SIZE, dtype=torch.float64)
    found, wanted = (
        scan()
        for scan in (
            lambda: selective_scan(ScanInputs(values, log_decays, keys, queries, samples, strengths), state),
            lambda: scanned_one_by_one(values, log_decays, keys, queries, samples, state, strengths),
        )
    )
    assert torch.allclose(found[0], wanted[0], rtol=0, atol=1e-11)
    assert torch.allclose(found[1], wanted[1], rtol=0, atol=1e-11)
    gradients = [
        torch.autograd.grad((read * weights).sum() + last.sum(), given) for read, last in (found, wanted)
    ]
    for own, reference in zip(*gradients, strict=True):
        assert torch.allclose(own, reference, rtol=1e-9, atol=1e-10)


def test_float32_is_near_float64_where_states_decay_much():
    """Sums of a chunk's decays reach hundreds, and differences of neighbours are small."""
    exact = inputs(200)
    exact[1] = 3 * exact[1]
    rounded = [x.detach().float() for x in exact]
    wanted = selective_scan(ScanInputs(*exact[:4]), exact[4])[0]
    # What rounding the inputs does is left out.
    wanted = selective_scan(ScanInputs(*(x.double() for x in rounded[:4])), rounded[4].double())[0]
    found = selective_scan(ScanInputs(*rounded[:4]), rounded[4])[0]
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("cut", [1, 3, 63, 64, 100])
def test_a_scan_goes_on_from_the_state_that_another_left(cut):
    values, log_decays, keys, queries, state = inputs(130)
    parts = (values, log_decays, keys, queries)
    whole, last = selective_scan(ScanInputs(*parts), state)
    first, between = selective_scan(ScanInputs(*(x[:, :cut] for x in parts)), state)
    second, end = selective_scan(ScanInputs(*(x[:, cut:] for x in parts)), between)
    assert torch.allclose(torch.cat([first, second], 1), whole, rtol=0, atol=1e-12)
    assert torch.allclose(end, last, rtol=0, atol=1e-12)


def test_a_convolution_is_torchs_within_each_sample():
    borders, channels = [0, 1, 4, 5, 9, 20], 6
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, borders[-1], channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, TAPS, generator=generator, dtype=torch.float64)
    bias = torch.randn(channels, generator=generator, dtype=torch.float64)
    nothing = values.new_zeros(1, TAPS - 1, channels)
    samples = samples_of(borders[-1], borders[1:-1])
    found = causal_convolution(values, weight, bias, samples_S=samples, before_BWC=nothing)
    for start, end in pairwise(borders):
        alone = torch.nn.functional.conv1d(
            values[:, start:end].transpose(1, 2), weight[:, None], bias, padding=TAPS - 1, groups=channels
        )[..., : end - start]
        assert torch.allclose(found[:, start:end], alone.transpose(1, 2), rtol=0, atol=1e-12)
    later = causal_convolution(
        values[:, 3:], weight, bias, samples_S=None, before_BWC=torch.cat([nothing[:, 3:], values[:, :3]], 1)
    )
    whole = causal_convolution(values, weight, bias, samples_S=None, before_BWC=nothing)
    assert torch.allclose(later, whole[:, 3:], rtol=0, atol=1e-12)
