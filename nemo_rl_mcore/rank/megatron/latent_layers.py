"""A linear layer that every tensor-parallel rank holds whole, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator


class ReplicatedLinear(torch.nn.Module):
    """A product with a weight that is the same on all ranks; under sequence parallelism each has its own tokens.

    init_method: fills the weight; left out, it is the configuration's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        inputs: int,
        outputs: int,
        init_method: Callable[[torch.Tensor], object] | None = None,
    ):
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=accelerator.device())
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            cast(Any, init_method or config.init_method)(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., outputs] for [..., inputs]; the second value is where upstream's layers have a bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


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


class LatentMoELayer(MoELayer):
    """Upstream's layer of experts, with projections to their latent and back that need no Transformer Engine."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *args: Any, **keywords: Any):
        assert config.moe_latent_size is not None
        without = copy(config)
        without.moe_latent_size = None
        of_latent = replace(submodules, experts=partial(_build, submodules.experts, config))
        super().__init__(without, of_latent, *args, **keywords)
        for part in (self, self.router, self.token_dispatcher):
            cast(Any, part).config = config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.fc1_latent_proj = ReplicatedLinear(config, hidden, latent)
        self.fc2_latent_proj = ReplicatedLinear(config, latent, hidden, config.output_layer_init_method)


def _build(experts: Any, config: TransformerConfig, count: int, _without: object, **keywords: Any) -> Any:
    return experts(count, config, **keywords)


def with_latent_experts(builder: Any) -> Any:
    """Return what builds a layer's experts, from what builds upstream's.

    Raises RefusedError where the installed Megatron says otherwise what a layer's experts are made of.
    """
    if isinstance(builder, partial) and builder.func is MoELayer:
        return partial(LatentMoELayer, *builder.args, **builder.keywords)
    raise RefusedError(
        f"policy.model.moe_latent_size: megatron-core {megatron_version} builds such experts only where Transformer "
        "Engine is installed; install the extra te, or megatron-core 0.19",
        code="missing-package",
    )
