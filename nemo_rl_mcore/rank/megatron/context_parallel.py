"""Context parallelism: the ranks of a group share the tokens of each sequence.

A sequence is cut into 2 CP slices of equal length, and rank r has slices r and 2 CP - 1 - r (zigzag): the work of
causal attention, which grows along the sequence, is then the same on each. That is the layout that Megatron's rotary
embedding and Transformer Engine's attention expect; samples of a packed row are cut one by one.

Losses need whole sequences: `ContextParallelMicrobatch` gives the model a rank's tokens, and gathers the outputs. Each
rank computes the loss of whole rows, and backpropagates only the gradient of its own tokens. The ranks' gradients of a
weight are summed over the data-parallel group, which includes the context ranks.

Shapes: B rows, L columns of a row of the model, CP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Self, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_rl_mcore.data.microbatch import Microbatch
from nemo_rl_mcore.rank.megatron import parallel_groups


@dataclass(frozen=True)
class ContextParallelMicrobatch(Microbatch):
    """A part of each sequence of `shared`; positions: int64 [L / CP], this rank's columns of its rows."""

    shared: Microbatch
    positions: Tensor

    @property
    def whole(self) -> Microbatch:
        return self.shared

    @property
    def borders(self) -> tuple[int, ...]:
        return self.whole.borders

    def to_model(self, values_BS: Tensor) -> Tensor:
        """[B, S, ...] to this rank's [B, L / CP, ...]."""
        return self.whole.to_model(values_BS).index_select(1, self.positions)

    def from_model(self, values: Tensor) -> Tensor:
        """[B, L / CP, ...] of each rank to [B, S, ...]; the gradient of a rank's own tokens flows back."""
        # Every rank computes the whole loss, so gradients are complete and must not be summed over the ranks.
        gathered = gather_in_order(
            values.transpose(0, 1), self.whole.borders, grad_of_every_rank_is_whole=True
        )
        return self.whole.from_model(gathered.transpose(0, 1))

    def to(self, device: torch.device) -> Self:
        whole = self.whole.to(device)
        return replace(
            self, rows=whole.rows, places=whole.places, shared=whole, positions=self.positions.to(device)
        )


def gather_in_order(local: Tensor, borders: Sequence[int], *, grad_of_every_rank_is_whole: bool) -> Tensor:
    """Gather the ranks' parts [L / CP, ...] of a sequence to [L, ...] in its order; borders: of a packed row's samples.

    grad_of_every_rank_is_whole: each rank's incoming gradient is complete, and it keeps its own part; otherwise the
    ranks' gradients are partial, and are summed.
    """
    ranks = context_parallel_size()
    gathered: Tensor = gather_from_sequence_parallel_region(
        local.contiguous(),
        tensor_parallel_output_grad=not grad_of_every_rank_is_whole,
        group=parallel_groups.context_parallel_group(),
    )
    order = zigzag(tuple(borders) or (0, len(gathered)), ranks).flatten()
    return gathered.index_select(0, order.argsort().to(local.device))


@lru_cache(maxsize=64)
def zigzag(borders: tuple[int, ...], ranks: int) -> Tensor:
    """Return each rank's positions in a row, int64 [CP, L / CP]; ValueError if a sample cannot be split evenly."""
    if ranks == 1:
        return torch.arange(borders[-1]).unsqueeze(0)
    parts: list[Tensor] = []
    for start, end in pairwise(borders):
        if (end - start) % (2 * ranks):
            raise ValueError(f"a sample of {end - start} tokens is not cut evenly into {2 * ranks} slices")
        slices = torch.arange(start, end).view(2 * ranks, -1)
        parts.append(torch.cat([slices[:ranks], slices.flip(0)[:ranks]], dim=1))
    return torch.cat(parts, dim=1)


def slices_of_a_sample(ranks: int) -> int:
    """Return the number of equal slices that a sample is cut into; 1 without context parallelism."""
    return 2 * ranks if ranks > 1 else 1


def context_parallel_size() -> int:
    return cast(int, parallel_state.get_context_parallel_world_size())


def context_parallel_rank() -> int:
    return cast(int, parallel_state.get_context_parallel_rank())
