"""Layer specs: Transformer Engine's modules, or local ones that run everywhere."""

from __future__ import annotations

import importlib.util
import re
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.attention import LocalAttention

_SINKS = re.compile(r".+\.core_attention\.softmax_offset")
_BIASES = re.compile(r".+\.mlp\.experts\..+\.bias\d*")
_NORM_EPSILON = 1e-6
"""Added to the mean square of a latent, whatever layernorm_epsilon is (transformers, DeepseekV3Attention)."""
_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""The norms of latents; in Transformer Engine's spec they are part of the following linear."""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm for local layers; unlike WrappedTorchNorm it allows sequence parallelism.

    A mark on its weight has `finalize_model_grads` sum the gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=accelerator.device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def use_transformer_engine(config: MegatronConfig) -> bool:
    """Return whether the layers are Transformer Engine's; `auto` uses it if CUDA and the package are available."""
    if config.transformer_impl == "auto":
        return accelerator.has_cuda() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def norm_of(config: MegatronConfig) -> Any:
    if not use_transformer_engine(config):
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def decoder_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return a layer's ModuleSpec, or the submodules of a stage; GPTModel accepts both, despite its annotation."""
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


def prediction_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block of multi-token prediction layers on the stage that holds them, None on others."""
    if not transformer.mtp_num_layers:
        return None
    try:
        # megatron-core 0.20 tests each layer against its inference classes, mocks without Transformer Engine.
        from megatron.core.tensor_parallel.inference_layers import (
            is_inference_column_parallel_linear,  # type: ignore[attr-defined]
        )

        is_inference_column_parallel_linear(None)
    except ImportError:  # before 0.20
        pass
    except TypeError as error:
        raise RefusedError(
            f"policy.model.mtp_num_layers: {transformer.mtp_num_layers}: megatron-core {megatron_version} builds "
            "prediction layers only where Transformer Engine is installed; install the extra te or megatron-core "
            "0.19, or set policy.model.mtp_num_layers: null",
            code="missing-package",
        ) from error
    fast = use_transformer_engine(config)
    block = get_gpt_mtp_block_spec(transformer, layer_spec(config, transformer), fast, vp_stage=vp_stage)
    if block is not None and not fast:
        for layer in block.layer_specs or ():
            parts: Any = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return block


def layer_spec(config: MegatronConfig, transformer: TransformerConfig, *, dense: bool = False) -> ModuleSpec:
    """Return the spec of one layer; dense: without experts, in a model where other layers have them.

    Raises RefusedError for context parallelism on GPUs with local layers, and for layers that the installed Megatron
    cannot build.
    """
    shared, engine = config.context_parallel_size, use_transformer_engine(config)
    if shared > 1 and accelerator.has_cuda() and not engine:
        raise RefusedError(
            f"policy.megatron_cfg.context_parallel_size: {shared} needs Transformer Engine's attention on GPUs, and "
            f"policy.megatron_cfg.transformer_impl: {config.transformer_impl} is local layers here; install the extra "
            "te on this machine, or set policy.megatron_cfg.context_parallel_size: 1",
            code="missing-package",
        )
    experts = None if dense else transformer.num_moe_experts
    latent = transformer.multi_latent_attention
    if latent and not hasattr(MLASelfAttention, "_qkv_down_projection"):
        # This version has no method in which the gradients of latents could be reduced.
        raise RefusedError(
            f"policy.model.kv_lora_rank: megatron-core {megatron_version} does not say where latents "
            "are made; install megatron-core 0.19",
            code="missing-package",
        )
    if not engine:
        return _local_layer_spec(transformer, experts)
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=latent,
    )
    if latent:
        cast(Any, layer.submodules).self_attention.module = LatentAttention
    return layer


def _local_layer_spec(transformer: TransformerConfig, experts: int | None) -> ModuleSpec:
    latent = transformer.multi_latent_attention
    submodules = get_gpt_layer_local_submodules(
        num_experts=experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=latent,
    )
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention: Any = cast(ModuleSpec, submodules.self_attention)
    attention.submodules.core_attention = LocalAttention
    if latent:
        attention.module = LatentAttention
    if transformer.qk_layernorm:
        for name in ("q_layernorm", "kv_layernorm" if latent else "k_layernorm"):
            setattr(attention.submodules, name, RMSNorm)
    if transformer.add_bias_linear and experts is not None:
        products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=_ExpertOutput)
        parts = MoESubmodules(experts=partial(SequentialMLP, submodules=products))
        submodules.mlp = cast(Any, partial(MoELayer, submodules=parts))
    if experts and transformer.moe_latent_size:
        builder = submodules.mlp
        if not isinstance(builder, partial) or builder.func is not MoELayer:
            raise RefusedError(
                f"policy.model.moe_latent_size: megatron-core {megatron_version} builds such experts only where "
                "Transformer Engine is installed; install the extra te, or megatron-core 0.19",
                code="missing-package",
            )
        submodules.mlp = cast(Any, partial(_LatentMoELayer, *builder.args, **builder.keywords))
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


class _ExpertOutput(RowParallelLinear):
    """Upstream's linear with a clone as its result: MLP.forward adds an expert's bias to it in place."""

    def forward(self, input_: torch.Tensor) -> Any:
        output, bias = super().forward(input_)
        return output.clone(), bias


def mark_for_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark sinks as sharded over ranks, and biases of experts as replicated.

    Without the mark the gradient norm would include the sinks of one rank only (tensor_parallel/layers.py,
    param_is_not_tensor_parallel_duplicate). And upstream would sum the gradients of experts' biases over the
    sequence-parallel ranks (RowParallelLinear marks them), although these hold other experts, or equal sums.
    """
    for name, parameter in model.named_parameters():
        if _SINKS.fullmatch(name) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif _BIASES.fullmatch(name):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


class _ReplicatedLinear(torch.nn.Module):
    """A linear with a weight replicated on all ranks; under sequence parallelism each rank has its own tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, draw: Any = None):
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=accelerator.device())
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            cast(Any, draw or config.init_method)(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return [..., outputs] for [..., inputs], and no bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Upstream's latent attention with latents that are equal on all tensor-parallel ranks."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any):
        super().__init__(config, *args, **keywords)
        keys_and_values = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        latents = {"linear_q_down_proj": self.config.q_lora_rank, "linear_kv_down_proj": keys_and_values}
        for name, size in latents.items():
            if config.transformer_impl == "local" and hasattr(self, name):
                setattr(self, name, _ReplicatedLinear(config, config.hidden_size, cast(int, size)))
        for part in (getattr(self, name, None) for name in _NORMS):
            if part is not None:
                part.eps = _NORM_EPSILON

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the parts as in the spec; upstream would normalise the hidden state twice."""
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in parts}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents [S', B, R] of queries, and of keys and values followed by the rotary part.

        The rotary part's gradient must be summed over the ranks' heads; under sequence parallelism its gather does so.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        if not self.config.sequence_parallel:
            sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
            latent, rotated = keys_and_values.split(sizes, dim=-1)
            rotated = cast(torch.Tensor, copy_to_tensor_model_parallel_region(rotated))
            keys_and_values = torch.cat([latent, rotated], dim=-1)
        return queries, keys_and_values


class _LatentMoELayer(MoELayer):
    """Upstream's MoE layer, with projections to the experts' latent and back that need no Transformer Engine."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *args: Any, **keywords: Any):
        hidden, latent = config.hidden_size, config.moe_latent_size
        assert latent is not None
        without = copy(config)
        without.moe_latent_size = None

        def experts(count: int, _without: object, **more: Any) -> Any:
            return submodules.experts(count, config, **more)

        super().__init__(without, replace(submodules, experts=experts), *args, **keywords)
        for part in (self, self.router, self.token_dispatcher):
            cast(Any, part).config = config
        self.fc1_latent_proj = _ReplicatedLinear(config, hidden, latent)
        self.fc2_latent_proj = _ReplicatedLinear(config, latent, hidden, config.output_layer_init_method)
