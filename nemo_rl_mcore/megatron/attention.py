"""The attention of the local layer spec: torch's fused kernel in place of scores that are written out.

Shapes: Q query and K key positions, B batch, N heads of this rank, D a head's size.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from nemo_rl_mcore.megatron.context_parallel import (
    context_parallel_rank,
    context_parallel_size,
    gather_in_order,
    zigzag,
)


class LocalAttention(DotProductAttention):
    """Megatron's attention without its [B, N, Q, K] scores; plain softmax, no dropout, no window.

    Memory grows with the sequence length, not with its square, on a CPU too. Under context parallelism a rank gathers
    the keys and values of the others for its own queries; their gradients go back to who has them, and add up there.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
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
        """[Q, B, N * D] for query [Q, B, N, D], key and value [K, B, groups, D].

        attention_mask: bool, broadcast to [B, N, Q, K], true where a query may not look. Without one a causal layer
        masks the future; a single query, the newest, sees every key.
        packed_seq_params: the borders of samples in a row, under context parallelism; there is no dimension B then.
        """
        shared = context_parallel_size() > 1
        if attention_bias is not None or (packed_seq_params is not None and not shared):
            raise ValueError("the local attention takes no bias, and the borders of samples as a mask")
        visible = None if attention_mask is None else ~attention_mask
        if shared:
            borders: tuple[int, ...] = ()
            if packed_seq_params is not None:
                borders = tuple(packed_seq_params.cu_seqlens_q.tolist())
                query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            key, value = (
                gather_in_order(x, borders, grad_of_every_rank_is_whole=False) for x in (key, value)
            )
            visible = _visible_keys(
                borders or (0, len(key)), context_parallel_size(), context_parallel_rank()
            )
            visible = visible.to(query.device)
        causal = visible is None and self.attn_mask_type is AttnMaskType.causal and query.shape[0] > 1
        repeats = query.shape[2] // key.shape[2]
        context_BNQD = scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, _repeat(key, repeats), _repeat(value, repeats))),
            attn_mask=visible,
            is_causal=causal,
            scale=self.softmax_scale,
        )
        return context_BNQD.permute(2, 0, 1, 3).flatten(2)


def _repeat(heads_KBGD: torch.Tensor, times: int) -> torch.Tensor:
    """Each query group's head once for every query head that shares it."""
    return heads_KBGD if times == 1 else heads_KBGD.repeat_interleave(times, dim=2)


@lru_cache(maxsize=1)  # every layer of a microbatch asks for the same one
def _visible_keys(borders: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """Bool [Q, K], true where a rank's query may look: at its own sample's past."""
    lengths = torch.tensor(borders).diff()
    sample_K = torch.arange(len(lengths)).repeat_interleave(lengths)
    position_Q = zigzag(borders, ranks)[rank]
    return (position_Q.unsqueeze(1) >= torch.arange(borders[-1])) & (
        sample_K[position_Q].unsqueeze(1) == sample_K
    )
