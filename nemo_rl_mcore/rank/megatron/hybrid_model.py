"""Megatron's HybridModel with a GPTModel's interface.

In a HybridModel, attention and feed-forward (or experts) are separate layers, listed as a string of characters: two
GPTModel layers become `*-*-`. Weights keep the order and names that GPTModel gives them, in each layer and in
checkpoints, although there are twice as many layers. A model with its own pattern, with Mamba layers, has one layer per
character, in checkpoints too.

Derived classes add what upstream lacks: a stack with the spec's final norm, and an output layer that calls a processor.
`HybridModel.forward` passes two arguments on without reading them: `runtime_gather_output` to the output layer, and
`labels` to the loss of its result. In a pass with a processor both carry a `_Question`.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import sharded_state_dict_default

from nemo_rl_mcore.config import MegatronConfig, PolicyConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.layer_specs import layer_spec, norm_of, use_transformer_engine
from nemo_rl_mcore.rank.megatron.recurrent_layers import ReferenceMambaLayer, ReferenceMambaMixer

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
        """Like a TransformerBlock's: one tensor per weight for all layers, unless the layers' kinds differ."""
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
