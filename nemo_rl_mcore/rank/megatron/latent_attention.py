"""Multi-head latent attention: Megatron's own, with what makes the latents whole on every tensor-parallel rank.

Upstream's local layers cut that by ranks (transformer/multi_latent_attention.py) and take the gradient of the keys'
rotated part, which all heads share, from the heads of one rank. Here it is laid out as Transformer Engine's is, and the
gradients of all heads come together.

Shapes: S sequence, S' a rank's part of it under sequence parallelism, B batch, H hidden, R the latent's width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank.megatron.replicated_linear import ReplicatedLinear

NORM_EPSILON = 1e-6
"""Added to the mean square of a latent, whatever layernorm_epsilon is (transformers, DeepseekV3Attention)."""


class LatentAttention(MLASelfAttention):
    """Upstream's attention, whose latents are the same on all tensor-parallel ranks."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any):
        super().__init__(config, *args, **keywords)
        if config.transformer_impl == "local":
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                if hasattr(self, name):
                    whole = self.config.q_lora_rank if "_q_" in name else self._keys_and_values
                    setattr(self, name, ReplicatedLinear(config, config.hidden_size, whole))
        for part in (getattr(self, name, None) for name in _NORMS):
            if part is not None:
                part.eps = NORM_EPSILON

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the parts as the spec has them; upstream would norm a hidden state that is no latent once more."""
        return {name: getattr(submodules, name) for name in _RESOLVED}

    @property
    def _keys_and_values(self) -> int:
        return self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents [S', B, R] of queries, and of keys and values with the rotated part after them.

        Under sequence parallelism the gather of the rotated part sums its gradient over the ranks' heads.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        if not self.config.sequence_parallel:
            latent, rotated = keys_and_values.split(
                [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
            )
            rotated = cast(torch.Tensor, copy_to_tensor_model_parallel_region(rotated))
            keys_and_values = torch.cat([latent, rotated], dim=-1)
        return queries, keys_and_values


_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""The norms of latents; Transformer Engine has them in what follows."""


def share_rotations(model: torch.nn.Module) -> None:
    """Have the layers of a stage rotate by one module; upstream makes one for each, all alike, with its own tables."""
    attentions = [part for part in model.modules() if isinstance(part, LatentAttention)]
    for attention in attentions[1:]:
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb


def require_latent_attention() -> None:
    """Raise RefusedError where the installed Megatron has no place for the gradients to come together."""
    if not hasattr(MLASelfAttention, "_qkv_down_projection"):
        raise RefusedError(
            f"policy.model.multi_latent_attention: true: megatron-core {megatron_version} does not say where latents "
            "are made; install megatron-core 0.19",
            code="missing-package",
        )
