"""The class of a policy's model, the one place that names it: upstream means to replace GPTModel by HybridModel.

GPTModel is deprecated from megatron-core 0.19 on (Megatron-LM issue 6071); HybridModel has no `output_processor` there
(Megatron-LM pull request 7008), and `hybrid_model` adds it. Either takes the same inputs and has the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank.megatron.layer_specs import decoder_spec, prediction_spec

if TYPE_CHECKING:
    from nemo_rl_mcore.rank.megatron.hybrid_model import HybridLanguageModel

    LanguageModel = GPTModel | HybridLanguageModel
else:
    LanguageModel = LanguageModule

__all__ = ["LanguageModel", "biased_routers", "language_model", "language_models"]


def language_model(
    policy: PolicyConfig, config: TransformerConfig, *, vp_stage: int | None, **keywords: Any
) -> LanguageModel:
    """Return a stage of the model on this rank; `keywords` are those that both classes have.

    Raises RefusedError, on every stage, where the installed Megatron has no such class or cannot build its layers.
    """
    megatron = policy.megatron_cfg
    if policy.model_class == "gpt":
        return GPTModel(
            config,
            decoder_spec(megatron, config, vp_stage),
            mtp_block_spec=prediction_spec(megatron, config, vp_stage),
            vp_stage=vp_stage,
            **keywords,
        )
    try:
        from nemo_rl_mcore.rank.megatron.hybrid_model import hybrid_model
    except ImportError as error:
        raise RefusedError(
            f"policy.megatron_cfg.model_class: {megatron.model_class}: megatron-core {megatron_version} has no "
            "HybridModel; install megatron-core 0.19, or set policy.megatron_cfg.model_class: gpt",
            code="missing-package",
        ) from error
    return hybrid_model(policy, config, vp_stage=vp_stage, **keywords)


def language_models(modules: Iterable[torch.nn.Module]) -> list[LanguageModel]:
    """Return the models inside of what Megatron wraps around them."""
    return [
        cast("LanguageModel", part)
        for module in modules
        for part in module.modules()
        if isinstance(part, LanguageModule)
    ]


def biased_routers(modules: Iterable[torch.nn.Module]) -> list[tuple[TopKRouter, torch.Tensor]]:
    """Return the routers whose experts have a bias, each with it, [experts]."""
    return [
        (part, part.expert_bias)
        for module in modules
        for part in module.modules()
        if isinstance(part, TopKRouter) and part.expert_bias is not None
    ]
