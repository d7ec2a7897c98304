"""The attention of the local layer spec: torch's fused kernel in place of scores that are written out.

Shapes: Q query and K key positions, B batch, N heads of this rank, D a head's size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.functional import scaled_dot_product_attention


class LocalAttention(DotProductAttention):
    """Megatron's attention without its [B, N, Q, K] scores; plain softmax, no dropout, no window.

    Memory grows with the sequence length, not with its square, on a CPU too.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
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
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("the local attention takes neither a bias nor packed sequences")
        causal = attention_mask is None and self.attn_mask_type is AttnMaskType.causal and query.shape[0] > 1
        repeats = query.shape[2] // key.shape[2]
        context_BNQD = scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, _repeat(key, repeats), _repeat(value, repeats))),
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=causal,
            scale=self.softmax_scale,
        )
        return context_BNQD.permute(2, 0, 1, 3).flatten(2)


def _repeat(heads_KBGD: torch.Tensor, times: int) -> torch.Tensor:
    """Each query group's head once for every query head that shares it."""
    return heads_KBGD if times == 1 else heads_KBGD.repeat_interleave(times, dim=2)
