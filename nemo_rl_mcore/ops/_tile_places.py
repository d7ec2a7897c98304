"""Where given vocabulary ids fall among the tiles of a head.

Shapes: N token rows, K ids in each, P = pairs of a token row and an id of this rank's vocabulary, p of them in
one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nemo_rl_mcore.ops._groups import VocabShard
from nemo_rl_mcore.ops._head_tiles import Tiling


@dataclass(frozen=True)
class TilePlaces:
    """Pairs sorted by tile, once for all: a tile finds its own without comparing every id with its panel."""

    shape: torch.Size
    """[N, K]."""
    pair_P: Tensor
    """Indices into the flattened [N, K]."""
    row_P: Tensor
    column_P: Tensor
    bounds: list[int]
    """Where the pairs of each tile begin and end, tiles in the order of the walk."""
    tiling: Tiling
    chunks: int

    @classmethod
    def of(cls, id_NK: Tensor, shard: VocabShard, tiling: Tiling) -> TilePlaces:
        """Sort the global ids that the shard holds; the others belong to other ranks."""
        column_NK = id_NK - shard.start
        held_NK = (column_NK >= 0) & (column_NK < shard.valid)
        pair_P = held_NK.reshape(-1).nonzero().squeeze(1)
        row_P, column_P = pair_P // id_NK.shape[1], column_NK.reshape(-1)[pair_P]
        panels, chunks = -(-shard.valid // tiling.cols), -(-id_NK.shape[0] // tiling.rows)
        tile_P, order_P = (column_P // tiling.cols * chunks + row_P // tiling.rows).sort()
        edges = torch.searchsorted(tile_P, torch.arange(panels * chunks + 1, device=id_NK.device))
        bounds = cast("list[int]", edges.tolist())  # pyright: ignore[reportUnknownMemberType]
        return cls(id_NK.shape, pair_P[order_P], row_P[order_P], column_P[order_P], bounds, tiling, chunks)

    def within(self, panel: slice, rows: slice) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One tile's pairs and their (row, column) in the tile."""
        tile: int = panel.start // self.tiling.cols * self.chunks + rows.start // self.tiling.rows
        span = slice(self.bounds[tile], self.bounds[tile + 1])
        return self.pair_P[span], (self.row_P[span] - rows.start, self.column_P[span] - panel.start)
