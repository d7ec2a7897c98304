"""Rewards that have several parts, by name: a column of a batch for each.

B episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_mcore.data.turns import Reply

_PREFIX = "rewards/"


def reward_columns(episodes: Sequence[Sequence[Reply]]) -> dict[str, Tensor]:
    """`rewards/NAME` fp32 [B] for each name in the replies to B episodes: the sum over an episode's replies.

    What a reply does not name counts as 0, and a dropped one as nothing. Weights are not applied.
    """
    heard = [[reply.rewards for reply in replies if reply.dropped is None] for replies in episodes]
    names = dict.fromkeys(name for parts in heard for part in parts for name in part)
    return {
        f"{_PREFIX}{name}": torch.tensor([sum(part.get(name, 0.0) for part in parts) for parts in heard])
        for name in names
    }


def with_equal_columns(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The batches with the same `rewards/NAME`: zeros where all episodes of one were dropped, and nothing is known."""
    rows = [len(next(iter(batch.values()))) for batch in batches]
    names = dict.fromkeys(name for batch in batches for name in batch if name.startswith(_PREFIX))
    return [
        {**{name: torch.zeros(count) for name in names}, **batch}
        for count, batch in zip(rows, batches, strict=True)
    ]


def part_means(batch: Mapping[str, Any], kept: Tensor) -> dict[str, float]:
    """`rewards/NAME_mean` of each part over the episodes that are kept, bool [B]; 0 where none is."""
    return {
        f"{name}_mean": float(column[kept].sum()) / max(int(kept.sum()), 1)
        for name, column in batch.items()
        if name.startswith(_PREFIX)
    }
