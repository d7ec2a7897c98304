"""MXFP4: numbers of four bits in blocks of 32 along the inputs of a product, each with a power of two as its scale.

Shapes: E experts, R outputs, G blocks of 32 inputs, two numbers in each of a block's 16 bytes, the lower bits first.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3; transformers' integrations/mxfp4.py for the order in files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_EXPONENT_OF_0 = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])


def packed_names(names: Collection[str]) -> Iterator[str]:
    """Yield the tensors that are there as blocks and scales."""
    for name in names:
        whole = name.removesuffix(_BLOCKS)
        if whole != name and whole + _SCALES in names:
            yield whole


def parts_of(name: str) -> tuple[str, str]:
    """Return what the blocks and the scales of a tensor are called."""
    return name + _BLOCKS, name + _SCALES


def shape_of(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor [E, 32 * G, R] for that of its blocks [E, R, G, 16]."""
    experts, outputs, groups, _ = blocks
    return experts, groups * _BLOCK, outputs


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, 32 * G, R] in bfloat16, which holds every such number.

    blocks: uint8 [E, R, G, 16]. scales: uint8 [E, R, G].
    """
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_OF_0
    values = torch.ldexp(_VALUES[codes.long()], exponents.unsqueeze(-1))
    return values.flatten(-2).transpose(-1, -2).to(torch.bfloat16)
