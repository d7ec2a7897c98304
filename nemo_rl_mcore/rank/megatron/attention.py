"""Attention of the local layer spec, on torch's fused kernel, which never materialises the scores.

Shapes: Q query and K key positions, B batch, N heads of this rank, D a head's size.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.context_parallel import (
    context_parallel_rank,
    context_parallel_size,
    gather_in_order,
    zigzag,
)

_BLOCK = 512
"""Queries per block under context parallelism; a block's mask takes 5 bytes per query and key."""


class LocalAttention(DotProductAttention):
    """Megatron's attention without [B, N, Q, K] scores and dropout; softmax_offset: attention sinks [N], or None.

    Memory is linear in the sequence length. Under context parallelism a rank gathers all keys and values for its own
    queries, in blocks; gradients of keys and values are summed on the ranks that own them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ):
        """See upstream; k_channels and v_channels, the head sizes, are ignored: they follow from the tensors."""
        # Upstream's constructor refuses context parallelism and puts sinks on a GPU; its forward pass is not used here.
        alone = copy.copy(config)
        alone.context_parallel_size, alone.softmax_type = 1, "vanilla"
        super().__init__(alone, *args, **kwargs)
        self.config = config
        if config.softmax_type == "learnable":
            # Every rank draws the sinks of all heads, so that all layouts start from the same values.
            heads, device = self.num_attention_heads_per_partition, accelerator.device()
            sinks = torch.empty(config.num_attention_heads, dtype=config.params_dtype, device=device)
            if config.perform_initialization:
                cast(Any, config.init_method)(sinks)
            first = self.tp_group.rank() * heads
            self.softmax_offset = torch.nn.Parameter(sinks[first : first + heads].clone())
        if config.softmax_type == "off-by-one" or self.attention_dropout.p > 0:
            raise ValueError("the local attention has neither a fixed softmax offset nor dropout")
        window = self.scale_mask_softmax.window_size
        self._window: int | None = None if window is None else window[0] + 1

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
        """Return [Q, B, N * D] for query [Q, B, N, D], key and value [K, B, groups, D]; values may have another D.

        attention_mask: bool, broadcast to [B, N, Q, K], true where attention is masked out. Without one a causal layer
        masks the future, and a single query sees every key. Sliding-window layers also mask keys outside the window.
        packed_seq_params: borders of the samples in a row, under context parallelism; inputs and result then have no
        dimension B.
        """
        shared = context_parallel_size() > 1
        if attention_bias is not None or (packed_seq_params is not None and not shared):
            raise ValueError("the local attention takes no bias, and the borders of samples as a mask")
        if shared:
            borders = () if packed_seq_params is None else tuple(packed_seq_params.cu_seqlens_q.tolist())
            return self._shared(query, key, value, borders)
        queries, keys, window = len(query), len(key), self._window
        if attention_mask is not None:
            visible = ~attention_mask
            if window is not None:
                visible = visible & self._visible(queries, keys, query.device)
            return self._attend(query, key, value, visible).flatten(2)
        causal = self.attn_mask_type is AttnMaskType.causal and queries > 1
        if window is None or window >= keys:
            return self._attend(query, key, value, causal=causal).flatten(2)
        # In blocks, so that masked scores are mostly not computed. The queries are at the last positions of the keys.
        context, behind = list[torch.Tensor](), keys - queries
        for start in range(0, queries, _BLOCK):
            end = min(start + _BLOCK, queries)
            seen = slice(max(0, behind + start - window + 1), behind + end)
            context.append(self._attend_from_last(query[start:end], key[seen], value[seen]))
        return torch.cat(context).flatten(2)

    def _shared(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: tuple[int, ...]
    ) -> torch.Tensor:
        if borders:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key, value = (gather_in_order(x, borders, grad_of_every_rank_is_whole=False) for x in (key, value))
        ranks, rank = context_parallel_size(), context_parallel_rank()
        context: list[torch.Tensor] = []
        for queries, keys in _blocks(borders or (0, len(key)), ranks, rank, _BLOCK, self._window):
            # A block's mask is made again in the backward pass: all of them together are as large as the scores.
            block = query[queries], key[keys], value[keys]
            attend = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            context.append(attend(self._attend_from_last, *block))
        joined = torch.cat(context).flatten(2)
        return joined.squeeze(1) if borders else joined

    def _attend_from_last(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return causal attention [Q, B, N, D] for queries at the last Q of the keys' positions, within the window."""
        return self._attend(query, key, value, self._visible(len(query), len(key), query.device))

    def _visible(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Return the causal mask [Q, K] for queries at the last Q positions: true where the key is visible."""
        behind = keys - queries
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
        return visible if self._window is None else visible.triu(behind - self._window + 1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """As `forward`, without the layer's window; visible: bool, as [B, N, Q, K]."""
        heads, scale, sinks = query.shape[2], self.softmax_scale, self.softmax_offset
        if heads > key.shape[2]:
            # Each query group's head once for every query head that shares it.
            key, value = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (key, value))
        if sinks is not None:
            # One more key with the value 0, whose score is its head's sink whatever the query. Queries and keys are one
            # channel longer: 1 in queries, 0 in keys, and the sink in the added key. It stands before the others, and
            # if they are causal a query before the first does too, which nobody reads.
            of_scores = scale or query.shape[-1] ** -0.5
            scale, query = of_scores, pad(query, (0, 1), value=1.0)
            key, value = (pad(part, (0, 1)) for part in (key, value))
            sink = pad((sinks.to(key.dtype) / of_scores).unsqueeze(-1), (key.shape[-1] - 1, 0))
            sink = sink.expand(1, *key.shape[1:])
            key, value = torch.cat([sink, key]), torch.cat([torch.zeros_like(sink), value])
            if causal:
                query = torch.cat([torch.zeros_like(query[:1]), query])
            elif visible is not None:
                visible = pad(visible, (1, 0), value=True)
        of_heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended = scaled_dot_product_attention(*of_heads, attn_mask=visible, is_causal=causal, scale=scale)
        context = attended.permute(2, 0, 1, 3)
        return context if sinks is None else context[1 if causal else 0 :, ..., :-1]


@lru_cache(maxsize=2)  # the same for every layer of a microbatch, with a window or without
def _blocks(
    borders: tuple[int, ...], ranks: int, rank: int, most: int, window: int | None = None
) -> list[tuple[slice, slice]]:
    """Return runs of at most `most` consecutive positions of a sample on this rank, each with the keys that it sees."""
    positions = zigzag(borders, ranks)[rank].tolist()
    starts = [
        column
        for column, last in enumerate([-2, *positions[:-1]])
        if positions[column] != last + 1 or positions[column] in borders
    ]
    blocks: list[tuple[slice, slice]] = []
    for first, after in pairwise([*starts, len(positions)]):
        for column in range(first, after, most):
            end = min(column + most, after)
            seen = borders[bisect_right(borders, positions[column]) - 1]
            if window is not None:
                seen = max(seen, positions[column] - window + 1)
            blocks.append((slice(column, end), slice(seen, positions[end - 1] + 1)))
    return blocks
