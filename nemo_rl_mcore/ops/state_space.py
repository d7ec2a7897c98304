"""The parts of Mamba-2 and of gated delta nets that look back along a sequence, in plain torch, for lack of kernels.

Sources: https://arxiv.org/abs/2405.21060, section 6 (the chunked scan); https://arxiv.org/abs/2412.06464, section 3
(gated delta nets).

Shapes: B rows, S sequence, C channels, W taps of the convolution, H heads, P head size, G groups of heads with common
keys and queries, N state size, Q positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

_CHUNK = 64


def causal_convolution(
    values_BSC: Tensor, weight_CW: Tensor, bias_C: Tensor, *, samples_S: Tensor | None, before_BWC: Tensor
) -> Tensor:
    """Return each channel's weighted sum of its last W values, [B, S, C]; before_BWC: the W - 1 values before.

    samples_S: int64, each position's sample in a packed row; values of other samples count as 0.
    """
    columns, taps = values_BSC.shape[1], weight_CW.shape[1]
    padded = torch.cat([before_BWC, values_BSC], dim=1)
    total = bias_C.expand_as(values_BSC)
    for back in range(taps):
        start = taps - 1 - back
        shifted = padded[:, start : start + columns]
        if samples_S is not None and back:
            same = samples_S == torch.nn.functional.pad(samples_S, (back, 0), value=-1)[:columns]
            shifted = shifted * same[:, None]
        total = total + shifted * weight_CW[:, start]
    return total


@dataclass(frozen=True)
class ScanInputs:
    """A scan's inputs per position, float32 or wider: values [B, S, H, P], log_decays [B, S, H], at most 0.

    keys, queries: [B, S, G, N], the directions in which values are written and read. samples: int64 [S], each
    position's sample in a packed row; None for a single sample. strengths: [B, S, H] of the delta rule, which writes
    this share of the difference between a value and the state in its direction; None adds values.
    """

    values: Tensor
    log_decays: Tensor
    keys: Tensor
    queries: Tensor
    samples: Tensor | None = None
    strengths: Tensor | None = None


def selective_scan(inputs: ScanInputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each position's result, [B, S, H, P], and the state [B, H, P, N] after the last one.

    At each position the state decays, adds the value along the key (or the delta rule's update), and is read
    along the query. A sample starts from zero.
    """
    read: list[Tensor] = []
    columns = inputs.values.shape[1]
    for start in range(0, columns, _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk = ScanInputs(
            *(x[:, part] for x in (inputs.values, inputs.log_decays, inputs.keys, inputs.queries)),
            samples=None if inputs.samples is None else inputs.samples[part],
            strengths=None if inputs.strengths is None else inputs.strengths[:, part],
        )
        # A sample that begins with the chunk must not see the previous sample's state.
        goes_on = (
            inputs.samples is None or not start or bool(inputs.samples[start] == inputs.samples[start - 1])
        )
        of_chunk, state_BHPN = _scan_chunk(chunk, state_BHPN if goes_on else torch.zeros_like(state_BHPN))
        read.append(of_chunk)
    return torch.cat(read, dim=1), state_BHPN


def _scan_chunk(chunk: ScanInputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """Scan a chunk's positions at once; the state belongs to the first position's sample."""
    values, precision = chunk.values, chunk.values.dtype
    heads, positions = values.shape[2], values.shape[1]
    # In float64: small differences of large sums follow.
    decays_BQH = chunk.log_decays.double().cumsum(1)
    samples_Q = chunk.samples
    if samples_Q is None:
        samples_Q = torch.zeros(positions, dtype=torch.long, device=values.device)
    of_first, of_last = samples_Q == samples_Q[0], samples_Q == samples_Q[-1]
    pairs_QQ = (samples_Q[:, None] == samples_Q).tril()  # a position sees its sample up to itself
    keys_BQHN, queries_BQHN = (
        x.repeat_interleave(heads // x.shape[2], dim=2) for x in (chunk.keys, chunk.queries)
    )

    between = decays_BQH.unsqueeze(2) - decays_BQH.unsqueeze(1)
    between = between.masked_fill(~pairs_QQ[:, :, None], -torch.inf).exp().to(precision)
    since_first = (decays_BQH.exp() * of_first[:, None]).to(precision)
    if chunk.strengths is not None:
        # Each position's update depends on the updates before it: a triangular system.
        stale = torch.einsum("bqhn,bhpn,bqh->bqhp", keys_BQHN, state_BHPN, since_first)
        fresh = ((values - stale) * chunk.strengths.unsqueeze(-1)).transpose(1, 2)
        overlaps = torch.einsum("bqhn,bkhn->bqkh", keys_BQHN, keys_BQHN) * between
        system = (overlaps * chunk.strengths.unsqueeze(2)).permute(0, 3, 1, 2)
        solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
        values = solve(system, fresh, upper=False, unitriangular=True).transpose(1, 2)
    products_BQQH = torch.einsum("bqhn,bkhn->bqkh", queries_BQHN, keys_BQHN) * between
    read = torch.einsum("bqkh,bkhp->bqhp", products_BQQH, values)
    read = read + torch.einsum("bqhn,bhpn,bqh->bqhp", queries_BQHN, state_BHPN, since_first)

    to_last = ((decays_BQH[:, -1:] - decays_BQH).exp() * of_last[:, None]).to(precision)
    state = torch.einsum("bqh,bqhp,bqhn->bhpn", to_last, values, keys_BQHN)
    return read, state + since_first[:, -1, :, None, None] * state_BHPN
