"""Layer specs: Transformer Engine's modules, or local ones that run everywhere.

The local attention uses torch's fused kernel, which never materialises the scores.

Shapes: Q query and K key positions, B batch, N heads of this rank, D a head's size.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import gather_in_order, zigzag
from nemo_rl_mcore.rank.megatron.recurrent_layers import ReferenceDeltaNet

_BLOCK = 512
"""Queries per block under context parallelism; a block's mask takes 5 bytes per query and key."""


class LocalAttention(DotProductAttention):
    """Megatron's attention without dropout or stored scores [B, N, Q, K]; softmax_offset: attention sinks [N], or None.

    Memory is linear in the sequence length. Under context parallelism a rank gathers all keys and values, and takes its
    own queries in blocks; the gradients of keys and values are summed on the ranks that own them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ):
        """As upstream; the head sizes, k_channels and v_channels, are ignored, since the tensors determine them."""
        # Upstream's constructor refuses context parallelism and puts sinks on a GPU; its forward pass is not used here.
        alone = copy(config)
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
        packed_seq_params: the row's sample boundaries, under context parallelism; inputs and result then have no
        dimension B.
        """
        shared = parallel_groups.group("context").size() > 1
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
        # In blocks, to skip most of the masked scores. The queries are at the last of the keys' positions.
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
        ranks, context = parallel_groups.group("context"), list[torch.Tensor]()
        whole = borders or (0, len(key))
        for queries, keys in _blocks(whole, ranks.size(), ranks.rank(), _BLOCK, self._window):
            # The backward pass recomputes a block's mask: all masks together are as large as the scores.
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
            # Repeats each query group's head once for every query head that shares it.
            key, value = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (key, value))
        if sinks is not None:
            # A sink is one more key with the value 0 and the same score for every query. Queries and keys get one
            # more channel: 1 in queries, 0 in keys, and the sink in the added key. The added key comes first; with a
            # causal mask so does an added query, whose result is dropped.
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


_NORM_EPSILON = 1e-6
"""Added to a latent's mean square, regardless of layernorm_epsilon (transformers, DeepseekV3Attention)."""
_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""The latents' norms; in Transformer Engine's spec they are part of the following linear."""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm for local layers; unlike WrappedTorchNorm it allows sequence parallelism.

    A weight centred at 0 multiplies by 1 plus its value, in fp32 at least. A mark on the weight makes
    `finalize_model_grads` sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps, self.centre = eps, 1 if config.layernorm_zero_centered_gamma else 0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), 1.0 - self.centre).to(accelerator.device(), config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm
        if not self.centre:
            return normed(hidden, (hidden.shape[-1],), self.weight, self.eps)
        precision = torch.promote_types(hidden.dtype, torch.float32)
        weight = self.weight.to(precision) + self.centre
        return normed(hidden.to(precision), (hidden.shape[-1],), weight, self.eps).to(hidden.dtype)


def use_transformer_engine(config: MegatronConfig) -> bool:
    """Return true for Transformer Engine's layers; `auto` uses them if CUDA and the package are available."""
    if config.transformer_impl == "auto":
        return accelerator.has_cuda() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def norm_of(config: MegatronConfig) -> Any:
    if not use_transformer_engine(config):
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def decoder_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return a layer's ModuleSpec or a stage's submodules; GPTModel accepts both, despite its annotation."""
    frequency, interval = transformer.moe_layer_freq, transformer.linear_attention_freq
    mixed = isinstance(frequency, list) or interval is not None
    if use_transformer_engine(config) and not mixed:
        return layer_spec(config, transformer)
    # The submodules include the final norm; a layer's spec would leave upstream's there.
    first = get_transformer_layer_offset(transformer, vp_stage=vp_stage) if mixed else 0
    layers = [
        layer_spec(
            config,
            transformer,
            dense=isinstance(frequency, list) and not frequency[number],
            linear=isinstance(interval, int) and (number + 1) % interval != 0,
        )
        for number in range(first, first + get_num_layers_to_build(transformer, vp_stage=vp_stage))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_of(config))


def prediction_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block of multi-token prediction layers on their stage, None on others."""
    if not transformer.mtp_num_layers:
        return None
    try:
        # megatron-core 0.20 tests each layer against its inference classes: mocks, without Transformer Engine.
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


def layer_spec(
    config: MegatronConfig, transformer: TransformerConfig, *, dense: bool = False, linear: bool = False
) -> ModuleSpec:
    """Return one layer's spec; dense: a dense layer of an MoE model; linear: a layer with a gated delta net.

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
        # This version has no method to reduce the latents' gradients in.
        raise RefusedError(
            f"policy.model.kv_lora_rank: megatron-core {megatron_version} has no method of its own "
            "for latents; install megatron-core 0.19",
            code="missing-package",
        )
    if not engine:
        layer = _local_layer_spec(transformer, experts)
        return _with_delta_net(layer, engine=False) if linear else layer
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=latent,
    )
    if latent:
        cast(Any, layer.submodules).self_attention.module = LatentAttention
    return _with_delta_net(layer, engine=True) if linear else layer


def _with_delta_net(layer: ModuleSpec, *, engine: bool) -> ModuleSpec:
    """Return the layer's spec with a gated delta net; engine: upstream's, for which fla must be installed."""
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=_NormOfHeads, out_proj=RowParallelLinear
    )
    net: type = ReferenceDeltaNet
    if engine:
        if importlib.util.find_spec("fla") is None:
            raise RefusedError(
                "policy.model.linear_attention_freq: on GPUs gated delta nets need the package "
                "flash-linear-attention; install it, or set policy.megatron_cfg.transformer_impl: local, which is slow",
                code="missing-package",
            )
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        net = GatedDeltaNet
        parts = replace(parts, in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear)
    # Transformer Engine fuses the norm into the projection; checkpoints of both have the same names.
    names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    submodules: Any = layer.submodules
    renamed = {} if engine else submodules.sharded_state_dict_keys_map | names
    attention = ModuleSpec(module=net, submodules=parts)
    return replace(
        layer,
        submodules=replace(submodules, self_attention=attention, sharded_state_dict_keys_map=renamed),
    )


class _NormOfHeads:
    """The norm of a gated delta net's heads, whose weight is not centred at 0.

    Each tensor-parallel rank norms its own heads: the weight's gradients are summed, by `finalize_model_grads` under
    sequence parallelism.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        centred = copy(config)
        centred.layernorm_zero_centered_gamma = False
        kind: Any = RMSNorm
        if config.transformer_impl == "transformer_engine":
            from megatron.core.extensions.transformer_engine import TENorm as kind
        norm, ranks = kind(centred, hidden_size, eps), parallel_groups.group("tensor")
        if ranks.size() > 1 and not config.sequence_parallel:
            norm.weight.register_hook(lambda grad: _summed(grad, ranks))
        return norm


def _summed(grad: torch.Tensor, ranks: torch.distributed.ProcessGroup) -> torch.Tensor:
    total = grad.clone()
    torch.distributed.all_reduce(total, group=ranks)
    return total


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
    """Upstream's linear, with a copied result, since MLP.forward adds an expert's bias to it in place."""

    def forward(self, input_: torch.Tensor) -> Any:
        output, bias = super().forward(input_)
        return output.clone(), bias


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
        """Map [..., inputs] to [..., outputs], and no bias."""
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
        """Return the spec's own parts; upstream's would normalise the hidden state twice."""
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in parts}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries' latents [S', B, R], and those of keys and values followed by the rotary part.

        The rotary part's gradient must be summed over the ranks' heads; under sequence parallelism the gather does it.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        if not self.config.sequence_parallel:
            sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
            latent, rotated = keys_and_values.split(sizes, dim=-1)
            rotated = cast(torch.Tensor, copy_to_tensor_model_parallel_region(rotated))
            keys_and_values = torch.cat([latent, rotated], dim=-1)
        return queries, keys_and_values


class _LatentMoELayer(MoELayer):
    """Upstream's MoE layer, with projections to the experts' latent and back without Transformer Engine."""

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
