"""Digests of token ids, taken where they are drawn and compared where they are trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def digest_of_ids(ids: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the first 8 bytes of blake2b over the ids as little-endian int64, as an int64."""
    found = hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8)
    return int.from_bytes(found.digest(), "little", signed=True)


def digests_of_rows(tokens_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Of the first tokens of each row, int64 [B]; all are int64 on the CPU."""
    lengths: list[int] = lengths_B.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    rows = zip(tokens_BT.numpy(), lengths, strict=True)
    return torch.tensor([digest_of_ids(ids[:length]) for ids, length in rows], dtype=torch.long)
