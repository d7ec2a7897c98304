"""What a policy's layers are made of: Transformer Engine's modules, or local ones that run everywhere."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.attention import LocalAttention
from nemo_rl_mcore.rank.megatron.biases import biased_experts
from nemo_rl_mcore.rank.megatron.latent_layers import (
    LatentAttention,
    require_latent_attention,
    with_latent_experts,
)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm for the local layer spec, also under sequence parallelism.

    WrappedTorchNorm (transformer/torch_norm.py) asserts against sequence parallelism; all that is missing there is the
    mark on the weight that tells `finalize_model_grads` to sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=accelerator.device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and dtype stay."""
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def use_transformer_engine(config: MegatronConfig) -> bool:
    """Return whether the layers are Transformer Engine's: as asked for, or with `auto` where CUDA and it exist."""
    if config.transformer_impl == "auto":
        return accelerator.has_cuda() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def norm_of(config: MegatronConfig) -> Any:
    """Return the class of the norms that stand alone."""
    if not use_transformer_engine(config):
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def decoder_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return a layer's ModuleSpec, or the submodules of a stage; GPTModel takes both, though annotated with the first.

    Raises RefusedError, on every stage, for ranks on GPUs that share sequences and have local layers.
    """
    layer, frequency = layer_spec(config, transformer), transformer.moe_layer_freq
    if use_transformer_engine(config) and not isinstance(frequency, list):
        return layer
    # The block form also names the final norm; a bare layer spec would still build the stock one there.
    layers = [layer] * get_num_layers_to_build(transformer, vp_stage=vp_stage)
    if isinstance(frequency, list):
        dense = layer_spec(config, transformer, dense=True)
        first = get_transformer_layer_offset(transformer, vp_stage=vp_stage)
        layers = [layer if frequency[number] else dense for number in range(first, first + len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_of(config))


def _refuse_local_attention(config: MegatronConfig) -> None:
    shared = config.context_parallel_size
    if shared > 1 and accelerator.has_cuda() and not use_transformer_engine(config):
        raise RefusedError(
            f"policy.megatron_cfg.context_parallel_size: {shared} needs Transformer Engine's attention on GPUs, and "
            f"policy.megatron_cfg.transformer_impl: {config.transformer_impl} is local layers here; install the extra "
            "te on this machine, or set policy.megatron_cfg.context_parallel_size: 1",
            code="missing-package",
        )


def prediction_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block of multi-token prediction layers, on the stage that holds them; None elsewhere, and without any.

    Raises ValueError, on every stage, where this Megatron cannot build them.
    """
    if not transformer.mtp_num_layers:
        return None
    if not builds_prediction_layers():
        raise RefusedError(
            f"policy.model.mtp_num_layers: {transformer.mtp_num_layers}: megatron-core {megatron_version} builds "
            "prediction layers only where Transformer Engine is installed; install the extra te or megatron-core "
            "0.19, or set policy.model.mtp_num_layers: null",
            code="missing-package",
        )
    fast = use_transformer_engine(config)
    block = get_gpt_mtp_block_spec(transformer, layer_spec(config, transformer), fast, vp_stage=vp_stage)
    if block is not None and not fast:
        for layer in block.layer_specs or ():
            parts: Any = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return block


def builds_prediction_layers() -> bool:
    """Return whether this Megatron can build prediction layers with the packages that are here.

    0.20 asks of each whether it is one of the layers for inference, whose classes are mocks without Transformer Engine.
    """
    try:
        from megatron.core.tensor_parallel.inference_layers import (
            is_inference_column_parallel_linear,  # type: ignore[attr-defined]
        )
    except ImportError:  # before 0.20
        return True
    try:
        is_inference_column_parallel_linear(None)
    except TypeError:
        return False
    return True


def layer_spec(config: MegatronConfig, transformer: TransformerConfig, *, dense: bool = False) -> ModuleSpec:
    """Return what one layer is made of, attention and feed-forward or experts, with the norms before them.

    dense: whether it has no experts, though others of the model have some.
    Raises RefusedError for ranks on GPUs that share sequences and have local layers.
    """
    _refuse_local_attention(config)
    experts = None if dense else transformer.num_moe_experts
    latent = transformer.multi_latent_attention
    if latent:
        require_latent_attention()
    if use_transformer_engine(config):
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=transformer.moe_grouped_gemm,
            qk_layernorm=transformer.qk_layernorm,
            multi_latent_attention=latent,
        )
        if latent:
            cast(Any, layer.submodules).self_attention.module = LatentAttention
        return layer
    submodules = get_gpt_layer_local_submodules(
        num_experts=experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=latent,
    )
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    if transformer.add_bias_linear and experts is not None:
        submodules.mlp = biased_experts()
    attention: Any = cast(ModuleSpec, submodules.self_attention)
    attention.submodules.core_attention = LocalAttention
    if latent:
        attention.module = LatentAttention
    if experts and transformer.moe_latent_size:
        submodules.mlp = with_latent_experts(submodules.mlp)
    if transformer.qk_layernorm:
        for name in ("q_layernorm", "kv_layernorm" if latent else "k_layernorm"):
            setattr(attention.submodules, name, RMSNorm)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
