"""Megatron's HybridModel with a GPTModel's interface, and a Mamba-2 layer without Megatron's CUDA kernels.

In a HybridModel, attention and feed-forward (or experts) are separate layers, listed as a string of characters: two
GPTModel layers become `*-*-`. Weights keep the order and names that GPTModel gives them, in each layer and in
checkpoints, although there are twice as many layers. A model with its own pattern, with Mamba layers, has one layer per
character, in checkpoints too.

Derived classes add what upstream lacks: a stack with the spec's final norm, and an output layer that calls a processor.
`HybridModel.forward` passes two arguments on without reading them: `runtime_gather_output` to the output layer, and
`labels` to the loss of its result. In a pass with a processor both carry a `_Question`.

Megatron's mixer needs the packages mamba_ssm and causal_conv1d, and a GPU. This one is slow, runs anywhere, and has the
same parameters, sharding and checkpoint.

Shapes: S sequence, B batch, H hidden, X channels of the input projection: gate z, values x, keys B, queries C, dt.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import silu, softplus

from nemo_rl_mcore.config import MegatronConfig, PolicyConfig
from nemo_rl_mcore.config.model import MAMBA_NORM_EPSILON, MAMBA_TAPS
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.ops.state_space import ScanInputs, causal_convolution, selective_scan
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import gather_in_order, sample_of_tokens, zigzag
from nemo_rl_mcore.rank.megatron.layer_specs import layer_spec, norm_of, use_transformer_engine

# Ranges of upstream's initialisation.
_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 0.1
_DECAYS = 1.0, 16.0


class ReferenceMambaLayer(MambaLayer):
    """Megatron's layer, but gets a packed row's samples from the attention mask."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Return the hidden states [S, B, H]; `attention_mask` is [1, 1, S, S], true where masked."""
        if attention_mask is not None and packed_seq_params is None:
            # A position that does not see the one before is its sample's first.
            first = attention_mask[0, 0].diagonal(-1).nonzero().flatten() + 1
            end = first.new_full((1,), attention_mask.shape[-1])
            borders = torch.cat([first.new_zeros(1), first, end])
            packed_seq_params = PackedSeqParams(cu_seqlens_q=borders)
        keywords["packed_seq_params"] = packed_seq_params
        return cast(Tensor, super().forward(hidden_states, attention_mask, *args, **keywords))


class ReferenceMambaMixer(MambaMixer):
    """Mamba-2 mixer; inherits the parameters' description and the checkpoint format from upstream's class."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_unused: Any,
    ):
        MegatronModule.__init__(self, config)  # upstream's constructor needs the kernels
        assert config.mamba_num_heads is not None
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.nheads, self.headdim = config.mamba_num_heads, config.mamba_head_dim
        self.ngroups, self.d_state = config.mamba_num_groups, config.mamba_state_dim
        self.d_inner = self.nheads * self.headdim
        ranks = self.tp_group.size()
        self.nheads_local_tp, self.ngroups_local_tp = self.nheads // ranks, self.ngroups // ranks
        self.d_inner_local_tp = self.d_inner // ranks
        common: Any = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            *(submodules.in_proj, d_model, sum(self._parts(1))),
            **common,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        # Each rank draws all ranks' parameters, from upstream's distributions, and keeps its part.
        convolved, bound = self._parts(1)[1:4], 1 / math.sqrt(MAMBA_TAPS)
        self.conv1d_weight = self._part(
            torch.empty(sum(convolved), 1, MAMBA_TAPS).uniform_(-bound, bound), convolved
        )
        self.conv1d_bias = self._part(torch.empty(sum(convolved)).uniform_(-bound, bound), convolved)
        steps = torch.empty(self.nheads).uniform_(math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP)).exp()
        before_softplus = steps + torch.log(-torch.expm1(-steps))
        self.dt_bias = self._part(before_softplus, (self.nheads,))
        self.A_log = self._part(torch.empty(self.nheads).uniform_(*_DECAYS).log(), (self.nheads,))
        self.D = self._part(torch.ones(self.nheads), (self.nheads,))
        scale = self._part(torch.ones(self.d_inner), (self.d_inner,))
        self.norm = GatedNorm(scale, self.ngroups_local_tp, self.tp_group)
        self.out_proj = build_module(
            *(submodules.out_proj, self.d_inner, d_model),
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )

    def _parts(self, ranks: int | None = None) -> tuple[int, int, int, int, int]:
        """Return the numbers of rows in z, x, B, C and dt, on this rank or over all ranks."""
        ranks = ranks or self.tp_group.size()
        inner, keys = self.d_inner // ranks, self.ngroups * self.d_state // ranks
        return inner, inner, keys, keys, self.nheads // ranks

    def _part(self, whole: Tensor, sections: Sequence[int]) -> Parameter:
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        own = torch.cat([section.chunk(ranks)[rank] for section in whole.split(list(sections))])
        parameter = Parameter(own.to(accelerator.device(), self.config.params_dtype))
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, H] to [S, B, H], and no bias; S is a rank's part under sequence and context parallelism.

        inference_context: the sequences' states so far; if given, hidden_states contains only the new tokens.
        """
        ranks, borders = parallel_groups.group("context"), ()
        if packed_seq_params is not None:
            borders = tuple(packed_seq_params.cu_seqlens_q.tolist())
        projected_SBX, _ = self.in_proj(hidden_states)
        if ranks.size() > 1:
            projected_SBX = gather_in_order(projected_SBX, borders, grad_of_every_rank_is_whole=False)
        samples_S = sample_of_tokens(borders) if borders else None
        mixed_BSD = self._mix(projected_SBX.transpose(0, 1), samples_S, inference_context)
        mixed_SBD = mixed_BSD.transpose(0, 1)
        if ranks.size() > 1:
            own = zigzag(borders or (0, len(mixed_SBD)), ranks.size())[ranks.rank()]
            mixed_SBD = mixed_SBD.index_select(0, own.to(mixed_SBD.device))
        return self.out_proj(mixed_SBD.contiguous())

    def _mix(self, projected_BSX: Tensor, samples_S: Tensor | None, context: Any) -> Tensor:
        """Return the input of the output projection, [B, S, heads of this rank * P]."""
        inner, _, keys, _, heads = self._parts()
        gate, convolved, steps = projected_BSX.split([inner, inner + 2 * keys, heads], dim=-1)
        precision = torch.promote_types(convolved.dtype, torch.float32)
        rows = len(projected_BSX)
        # The last values [B, W - 1, C] and the state [B, H, P, N] before these tokens: a decoding session's, or zeros.
        # A session keeps them like keys and values, with rows in the second dimension, and can so reorder them.
        if context is not None and context.sequence_len_offset:
            kept = context.key_value_memory_dict[self.layer_number]
            before, state = (x[:, :rows] for x in kept)
            before_BWC, state_BHPN = before.transpose(0, 1), state[0]
        else:
            before_BWC = convolved.new_zeros(rows, MAMBA_TAPS - 1, inner + 2 * keys)
            state_BHPN = convolved.new_zeros(rows, heads, self.headdim, self.d_state, dtype=precision)
        convolution = causal_convolution(
            *(convolved, self.conv1d_weight.squeeze(1), self.conv1d_bias),
            samples_S=samples_S,
            before_BWC=before_BWC,
        )
        groups = self.ngroups_local_tp
        x, b, c = (
            part.unflatten(-1, (number, -1)).to(precision)
            for part, number in zip(
                silu(convolution).split([inner, keys, keys], dim=-1), (heads, groups, groups), strict=True
            )
        )
        steps_BSH = softplus(steps.to(precision) + self.dt_bias.to(precision))
        log_decays = -self.A_log.to(precision).exp() * steps_BSH
        read, state_BHPN = selective_scan(
            ScanInputs(x * steps_BSH.unsqueeze(-1), log_decays, b, c, samples_S), state_BHPN
        )
        if context is not None:
            last_BWC = torch.cat([before_BWC, convolved], dim=1)[:, -before_BWC.shape[1] :]
            parts = last_BWC.transpose(0, 1), state_BHPN.unsqueeze(0)
            room = tuple(x.new_zeros(x.shape[0], context.max_batch_size, *x.shape[2:]) for x in parts)
            for whole, part in zip(room, parts, strict=True):
                whole[:, :rows] = part
            context.key_value_memory_dict[self.layer_number] = room
        mixed = (read + x * self.D.to(precision).unsqueeze(-1)).flatten(2).to(gate.dtype)
        return self.norm(mixed, gate)

    train = cast(Any, torch.nn.Module.train)  # upstream's override clears a cache that does not exist here


class GatedNorm(torch.nn.Module):
    """Gated root-mean-square norm over each group of channels."""

    def __init__(self, weight: Parameter, groups: int, tensor_parallel: torch.distributed.ProcessGroup):
        super().__init__()
        self.weight, self.groups, self.tp_group = weight, groups, tensor_parallel

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        precision = torch.promote_types(values.dtype, torch.float32)
        let_through = values.to(precision) * silu(gate.to(precision))
        grouped = let_through.unflatten(-1, (self.groups, -1))
        normed = torch.nn.functional.rms_norm(grouped, grouped.shape[-1:], eps=MAMBA_NORM_EPSILON)
        return (normed.flatten(-2) * self.weight.to(precision)).to(values.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            *(self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets),
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


_KERNELS = ("mamba_ssm", "causal_conv1d", "einops")


def mamba_layer_spec(config: MegatronConfig) -> ModuleSpec:
    """Return a layer's spec; RefusedError on GPUs without the kernels' packages, or with local layers' masks."""
    # Not a type, despite upstream's annotation; hybrid_layer_specs.py passes the same function.
    add = cast(type, get_bias_dropout_add)
    if not accelerator.has_cuda():
        local = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        return ModuleSpec(
            module=ReferenceMambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm_of(config),
                mixer=ModuleSpec(module=ReferenceMambaMixer, submodules=local),
                mamba_bda=add,
                # Transformer Engine fuses the norm into the projection.
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        )
    missing = [package for package in _KERNELS if importlib.util.find_spec(package) is None]
    if missing or not use_transformer_engine(config):
        raise RefusedError(
            "policy.model.hybrid_layer_pattern: on GPUs Mamba layers need Transformer Engine's layers "
            f"(policy.megatron_cfg.transformer_impl: {config.transformer_impl}) and the packages "
            f"{', '.join(_KERNELS)} (missing: {', '.join(missing) or 'none'}); install the extra te and these packages",
            code="missing-package",
        )
    from megatron.core.extensions.transformer_engine import (
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    projections = MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=projections)
    return ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add))


_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_FEED_FORWARD = ("pre_mlp_layernorm", "mlp", "mlp_bda")


def hybrid_model(policy: PolicyConfig, config: TransformerConfig, **keywords: Any) -> HybridLanguageModel:
    model, megatron, parts_of_a_layer = policy.model, policy.megatron_cfg, policy.parts_of_a_layer
    pair = Symbols.ATTENTION + (Symbols.MLP if model.num_moe_experts is None else Symbols.MOE)
    whole = model.hybrid_layer_pattern or pair * model.num_layers
    stages, first = list[str](), 0
    for layers in megatron.layers_of_chunks(model.num_layers):
        after = first + layers * parts_of_a_layer
        stages.append(whole[first:after])
        first = after
    layer, dense = layer_spec(megatron, config), layer_spec(megatron, config, dense=True)
    parts = HybridStackSubmodules(
        attention_layer=_part(layer, _ATTENTION),
        mlp_layer=_part(dense, _FEED_FORWARD),
        moe_layer=_part(layer, _FEED_FORWARD),
    )
    if model.shape.has_mamba:
        parts.mamba_layer = mamba_layer_spec(megatron)
    stack = ModuleSpec(
        module=_Stack,
        params={"final_norm": norm_of(megatron), "parts_of_a_layer": parts_of_a_layer},
        submodules=parts,
    )
    pattern = Symbols.PIPE.join(stages)
    built = HybridLanguageModel(config, stack, hybrid_layer_pattern=pattern, **keywords)
    if built.post_process:
        assert type(built.output_layer) is ColumnParallelLinear
        built.output_layer.__class__ = _OutputLayer  # the same layer, with another `forward`
    return built


def _part(layer: ModuleSpec, names: tuple[str, ...]) -> ModuleSpec:
    """Return a layer with these modules only; all other parts are identities."""
    nothing = TransformerLayerSubmodules()
    kept = {*names, "sharded_state_dict_keys_map"}
    others = {field.name: getattr(nothing, field.name) for field in fields(nothing) if field.name not in kept}
    return replace(layer, submodules=replace(cast(Any, layer.submodules), **others))


class _Stack(HybridStack):
    """The layers with any final norm (upstream's is Transformer Engine's), stored as in a GPTModel's checkpoint."""

    def __init__(
        self, config: TransformerConfig, *args: Any, final_norm: Any, parts_of_a_layer: int, **keywords: Any
    ):
        super().__init__(config, *args, post_layer_norm=False, **keywords)
        self.parts_of_a_layer = parts_of_a_layer
        self.final_layernorm: torch.nn.Module | None = None
        if self.post_process:
            self.final_layernorm = final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        hidden_SBH = cast(torch.Tensor, super().forward(*args, **keywords))
        return hidden_SBH if self.final_layernorm is None else self.final_layernorm(hidden_SBH)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] | None = None, metadata: Any = None
    ) -> ShardedStateDict:
        """As a TransformerBlock: one tensor for a weight of all layers, unless these differ in kind."""
        state: ShardedStateDict = {}
        parts = self.parts_of_a_layer
        apart = parts == 1 or (metadata or {}).get("non_homogeneous_layers")
        for number, layer in enumerate(cast("list[TransformerLayer]", self.layers)):
            own, name, place = f"{prefix}layers.{number}.", f"{prefix}layers.", ()
            of_all = (layer.layer_number - 1) // parts
            if apart:
                name += f"{of_all}."
            else:
                place = ((0, of_all, self.config.num_layers // parts),)
            of_layer = layer.sharded_state_dict(own, place, metadata)
            replace_prefix_for_sharding(of_layer, own, name)
            state |= of_layer
        if self.final_layernorm is not None:
            name, nowhere = f"{prefix}final_layernorm.", cast(Any, ())
            state |= sharded_state_dict_default(
                self.final_layernorm, name, nowhere, metadata, tp_group=self.tp_group
            )
        return state


@dataclass
class _Question:
    """A request to the output layer for a processor's result; passes through upstream's steps in place of logits."""

    processor: Callable[..., Any]
    answer: Any = None


class _OutputLayer(ColumnParallelLinear):
    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | _Question | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        question = runtime_gather_output
        if not isinstance(question, _Question):
            return super().forward(input_, weight, question)
        question.answer = question.processor(hidden_states=input_, output_layer=self, output_weight=weight)
        return question, None


class HybridLanguageModel(HybridModel):
    def forward(
        self,
        *inputs: Any,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        padding_mask: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As `GPTModel.forward`: return the processor's result on a last stage, hidden states [S, B, H] on others.

        padding_mask: bool [B, S], true for padding; whole on the first stage, which splits it like the ids.
        """
        if padding_mask is not None and self.pre_process and self.config.sequence_parallel:
            by_position = padding_mask.transpose(0, 1).contiguous()
            padding_mask = scatter_to_sequence_parallel_region(by_position).transpose(0, 1).contiguous()
        if output_processor is not None:
            asked = partial(
                output_processor, context=output_processor_context, scale_logits=self._scale_logits
            )
            keywords |= dict.fromkeys(("labels", "runtime_gather_output"), _Question(asked))
        return super().forward(*inputs, padding_mask=padding_mask, **keywords)

    def compute_language_model_loss(self, labels: Any, logits: Any) -> Any:
        if not isinstance(labels, _Question):
            return super().compute_language_model_loss(labels, logits)
        # If the output layer did not get the question, these are logits, and `require_hook` raises.
        return logits.answer if isinstance(logits, _Question) else logits

    def _scale_logits(self, logits: Any) -> Any:
        return logits if isinstance(logits, _Question) else super()._scale_logits(logits)
