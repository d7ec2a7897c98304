"""The attention of the local layer spec: torch's fused kernel in place of scores that are written out.

Shapes: Q query and K key positions, B batch, N heads of this rank, D a head's size.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nemo_rl_mcore.megatron.context_parallel import (
    context_parallel_rank,
    context_parallel_size,
    gather_in_order,
    zigzag,
)

_BLOCK = 512
"""Queries that attend at once under context parallelism; their mask takes 5 bytes for each key."""


class LocalAttention(DotProductAttention):
    """Megatron's attention without its [B, N, Q, K] scores; plain softmax, no dropout, no window.

    Memory grows with the sequence length, not with its square, on a CPU too. Under context parallelism a rank gathers
    the keys and values of the others for its own queries, which take turns in blocks; the gradients of keys and values
    go back to who has them, and add up there.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ):
        """See upstream; k_channels and v_channels are sizes of a head, which the tensors say."""
        # Its own forward pass, which is not used here, is refused under context parallelism.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        window = self.scale_mask_softmax.window_size
        if self.softmax_offset is not None or self.attention_dropout.p > 0 or window is not None:
            raise ValueError("the local attention has neither softmax offset nor dropout nor sliding window")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[Q, B, N * D] for query [Q, B, N, D], key and value [K, B, groups, D]; D of a value may be another.

        attention_mask: bool, broadcast to [B, N, Q, K], true where a query may not look. Without one a causal layer
        masks the future; a single query, the newest, sees every key.
        packed_seq_params: the borders of samples in a row, under context parallelism; there is no dimension B then, in
        the result either.
        """
        shared = context_parallel_size() > 1
        if attention_bias is not None or (packed_seq_params is not None and not shared):
            raise ValueError("the local attention takes no bias, and the borders of samples as a mask")
        if shared:
            borders = () if packed_seq_params is None else tuple(packed_seq_params.cu_seqlens_q.tolist())
            return self._shared(query, key, value, borders)
        visible = None if attention_mask is None else ~attention_mask
        causal = visible is None and self.attn_mask_type is AttnMaskType.causal and query.shape[0] > 1
        return _attend(query, key, value, visible, causal, self.softmax_scale).flatten(2)

    def _shared(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: tuple[int, ...]
    ) -> torch.Tensor:
        """Attend from this rank's queries to the keys of all ranks, block by block."""
        if borders:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key, value = (gather_in_order(x, borders, grad_of_every_rank_is_whole=False) for x in (key, value))
        blocks = _blocks(borders or (0, len(key)), context_parallel_size(), context_parallel_rank(), _BLOCK)
        # A block's mask is made again in the backward pass: all of them together are as large as the scores.
        context = [
            checkpoint(
                _attend_from_last,
                *(query[block.queries], key[block.keys], value[block.keys], self.softmax_scale),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for block in blocks
        ]
        joined = torch.cat(context).flatten(2)
        return joined.squeeze(1) if borders else joined


def _attend_from_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """[Q, B, N, D] for queries at the last Q of the keys' positions: each sees what is not behind it."""
    queries, keys = len(query), len(key)
    visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return _attend(query, key, value, visible, False, scale)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """[Q, B, N, D] for query [Q, B, N, D], key and value [K, B, groups, D]; visible: bool, as [B, N, Q, K]."""
    repeats = query.shape[2] // key.shape[2]
    context_BNQD = scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, _repeat(key, repeats), _repeat(value, repeats))),
        attn_mask=visible,
        is_causal=causal,
        scale=scale,
    )
    return context_BNQD.permute(2, 0, 1, 3)


def _repeat(heads_KBGD: torch.Tensor, times: int) -> torch.Tensor:
    """Return each query group's head once for every query head that shares it."""
    return heads_KBGD if times == 1 else heads_KBGD.repeat_interleave(times, dim=2)


class _Block(NamedTuple):
    """Columns of this rank whose positions follow each other in a sample, and the keys of it up to the last one."""

    queries: slice
    keys: slice


@lru_cache(maxsize=1)  # every layer of a microbatch asks for the same ones
def _blocks(borders: tuple[int, ...], ranks: int, rank: int, most: int) -> list[_Block]:
    positions = zigzag(borders, ranks)[rank].tolist()
    starts = [
        column
        for column, last in enumerate([-2, *positions[:-1]])
        if _begins(positions[column], last, borders)
    ]
    blocks: list[_Block] = []
    for first, after in pairwise([*starts, len(positions)]):
        for column in range(first, after, most):
            end = min(column + most, after)
            sample = _first_of_sample(positions[column], borders)
            blocks.append(_Block(slice(column, end), slice(sample, positions[end - 1] + 1)))
    return blocks


def _begins(position: int, last: int, borders: tuple[int, ...]) -> bool:
    return position != last + 1 or position in borders


def _first_of_sample(position: int, borders: tuple[int, ...]) -> int:
    return borders[bisect_right(borders, position) - 1]
