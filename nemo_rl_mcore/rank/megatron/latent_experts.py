"""Experts of a latent that is narrower than the hidden state (Nemotron 3 Super), without Transformer Engine.

Upstream's layer (transformer/moe/moe_layer.py) makes the projections to the latent and back of Transformer Engine's
linear layers, and refuses to be built without it. All else is upstream's.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

from megatron.core import __version__ as megatron_version
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank.megatron.replicated_linear import ReplicatedLinear


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
