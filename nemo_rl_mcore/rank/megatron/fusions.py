"""Choose Megatron's fused kernels for a model, and the parts of its layers that the backward pass computes again."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.layer_specs import use_transformer_engine
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE

_APEX = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True)
class Kernels:
    """Hardware and packages to compute with.

    gpu: a CUDA device. engine: layers are Transformer Engine's. apex: Apex's products that add to a gradient buffer.
    """

    gpu: bool
    engine: bool
    apex: bool

    @classmethod
    def here(cls, config: MegatronConfig) -> Kernels:
        """Return what this process has for such a model."""
        apex = importlib.util.find_spec(_APEX) is not None
        return cls(accelerator.has_cuda(), use_transformer_engine(config), apex)


def fused_settings(config: MegatronConfig, kernels: Kernels, *, scaled: bool, gated: bool) -> dict[str, bool]:
    """Return fields of a TransformerConfig.

    scaled: rotations are YaRN's, or those of latent attention; gated: of feed-forward layers.

    Raises RefusedError where the recipe wants gradients added by an extension that is not there: the output layer is
    Megatron's own, which has no other way to (tensor_parallel/layers.py, ColumnParallelLinear).
    """
    accumulated = config.gradient_accumulation_fusion
    if accumulated is True and not (kernels.gpu and kernels.apex):
        raise _needs("gradient_accumulation_fusion: true", f"Apex's {_APEX}", "set it to auto or false")
    return {
        "bias_activation_fusion": gated and _on(config.bias_activation_fusion, kernels.gpu),
        # The fused kernel of packed rows leaves out what YaRN multiplies cosines and sines by, and that of latent
        # attention is YaRN's alone, and decodes nothing.
        "apply_rope_fusion": config.apply_rope_fusion and kernels.engine and not scaled,
        "gradient_accumulation_fusion": _on(accumulated, kernels.gpu and kernels.engine and kernels.apex),
        "moe_permute_fusion": config.moe_permute_fusion and kernels.engine,
    }


def _on(given: object, where_it_runs: bool) -> bool:
    return where_it_runs if given == "auto" else given is True


def recomputed_settings(config: MegatronConfig, kernels: Kernels, *, parts_of_a_layer: int) -> dict[str, Any]:
    """Return fields of a TransformerConfig that say what is computed again; none where everything is kept.

    parts_of_a_layer: layers of Megatron that are one of the model's.

    Raises RefusedError for parts whose outputs Megatron discards with the help of Transformer Engine, without that
    (tensor_parallel/random.py, CheckpointWithoutOutputFunction).
    """
    if not config.activation_checkpointing:
        return {}
    if config.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": parts_of_a_layer,
        }
    parts = config.recompute_modules
    for part in parts or ():
        if part in OF_ENGINE and not kernels.engine:
            raise _needs(f"recompute_modules: {part}", "Transformer Engine's layers", "leave it out")
    return {
        "recompute_granularity": "selective",
        "recompute_modules": None if parts is None else list(parts),
    }


def _needs(setting: str, what: str, remedy: str) -> RefusedError:
    text = f"policy.megatron_cfg.{setting} needs a GPU and {what}, and they are not here; install it, or {remedy}"
    return RefusedError(text, code="missing-package")


def recomputes_routers(config: TransformerConfig) -> bool:
    """Return whether the backward pass computes again where tokens go."""
    return config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )
