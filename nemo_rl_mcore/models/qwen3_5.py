"""Qwen3.5: gated delta nets and gated attention, dense or MoE. Its models also see images; here, only text.

A published config.json nests the language model's in `text_config`, and its tensors, `model.language_model...`, are
beside those of the vision model, which are skipped, and a layer's experts are in one tensor. A written folder has the
language model alone, with the same names, and a tensor per expert; vLLM accepts it in either kind of model.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import MAMBA_TAPS, ROTATED_SHARE, ModelConfig
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models.family import OUTPUT_BIAS, Family, HFConfig, Refusal
from nemo_rl_mcore.models.weights import (
    ATTENTION,
    COLUMNS,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    OUTPUT,
    POST_ATTENTION_NORM,
    REPLICATED,
    ROWS,
    SHARED_EXPERT,
    Layout,
    Outside,
    Packing,
    Slot,
    experts,
    linear_convolved,
    linear_projected,
    slots,
)

_LINEAR, _FULL, _KINDS, _INTERVAL = (
    "linear_attention",
    "full_attention",
    "layer_types",
    "full_attention_interval",
)
_SHARE = "partial_rotary_factor"
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of rotary positions of images; a text's positions in all directions are equal."""
_NESTED = ("qwen3_5", "qwen3_5_moe")


def language_part(config: HFConfig) -> HFConfig:
    """Return the config.json of the language model in a model that also sees images; return others unchanged."""
    kind, text = config.get("model_type"), config.get("text_config")
    if kind not in _NESTED or not isinstance(text, Mapping):
        return config
    return {**cast("HFConfig", text), "model_type": f"{kind}_text"}


def _complete(values: HFConfig) -> Mapping[str, object]:
    """Return the interval of full attention, the share of heads that is rotated, and transformers' defaults."""
    kinds = cast("list[str]", values.get(_KINDS) or [])
    interval = cast("int", values.get(_INTERVAL) or 4)
    if kinds:
        interval = kinds.index(_FULL) + 1 if _FULL in kinds else max(interval, len(kinds) + 1)
    rotary = dict(cast("HFConfig", values.get("rope_parameters") or {}))
    share = rotary.pop(_SHARE, values.get(_SHARE) or ROTATED_SHARE)
    return {
        _INTERVAL: interval,
        "rope_parameters": {key: value for key, value in rotary.items() if key not in _OF_IMAGES},
        "intermediate_size": values.get("intermediate_size") or values.get("moe_intermediate_size"),
        # Only an unsupported share is left, and 1 would be allowed.
        _SHARE: None if share == ROTATED_SHARE else quoted(share),
    }


def _problems(values: HFConfig) -> Iterator[Problem]:
    kinds, interval = cast("list[str]", values.get(_KINDS) or []), cast("int", values[_INTERVAL])
    if kinds and (len(kinds) != values.get("num_hidden_layers") or kinds != _kinds(len(kinds), interval)):
        what = f"{quoted(kinds)} of a {values['model_type']} model is not {_FULL} in every n-th layer"
        yield Problem("not-supported", _KINDS, f"{what}, and {_LINEAR} in all others", "", (_INTERVAL,))


def _kinds(layers: int, interval: int) -> list[str]:
    return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]


def _write(model: ModelConfig, origin: HFConfig) -> Mapping[str, object]:
    rotary = {"rope_theta": model.rotary_base, "rope_type": "default", _SHARE: ROTATED_SHARE}
    written: dict[str, object] = {
        _KINDS: _kinds(model.num_layers, model.linear_attention_freq or 1),
        "rope_parameters": rotary,
        _SHARE: ROTATED_SHARE,
        "mtp_num_hidden_layers": 0,
    }
    if model.num_moe_experts is not None:
        coefficient = origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff)
        of_one = {"moe_intermediate_size": model.shape.expert_ffn_size}
        written |= {**of_one, "router_aux_loss_coef": coefficient}
    return written


_PREFIX = "model.language_model."
_PLAIN = re.compile(r"^model\.(?!language_model\.|visual\.)")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def _stored(name: str, shape: Callable[[], tuple[int, ...]]) -> Mapping[str, tuple[int | None, slice]]:
    """Return the tensors in a file's tensor: all experts', or one; its name may omit the language model's part."""
    name = _PLAIN.sub(_PREFIX, name)
    if (fused := _FUSED.fullmatch(name)) is None:
        return {name: (None, slice(0))}
    count, rows, _ = shape()
    parts = {"down_proj": slice(0, rows)}
    if fused[2] == "gate_up_proj":
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return {
        f"{fused[1]}.{expert}.{part}.weight": (expert, own)
        for expert in range(count)
        for part, own in parts.items()
    }


def _is_full(model: ModelConfig, layer: int) -> bool:
    return not model.is_linear(layer)


_PROJECTED = Layout(0, Packing.JOINED, sections=linear_projected)
_CONVOLVED = Layout(0, sections=linear_convolved)
_OF_PROJECTION = "linear_convolved hidden, linear_values hidden, linear_heads hidden, linear_heads hidden"
_IN_PROJ = "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight"
_DELTA_NET = slots(
    (r"in_proj\.weight", _IN_PROJ, _PROJECTED, _OF_PROJECTION),
    (r"conv1d\.weight", "conv1d.weight", _CONVOLVED, "linear_convolved one mamba_taps"),
    *((name, name, ROWS, "linear_heads") for name in ("dt_bias", "A_log")),
    (r"out_norm\.weight", "norm.weight", REPLICATED, "linear_head"),
    (r"out_proj\.weight", "out_proj.weight", COLUMNS, "hidden linear_values"),
    within=r"self_attention\.",
    named="linear_attn.{}",
    in_layer=ModelConfig.is_linear,
)


def _attention(slot: Slot) -> Slot:
    if slot.hugging_face[0] == "self_attn.q_proj.weight":  # with the gates
        slot = replace(slot, sizes=("queries_and_gates hidden", *slot.sizes[1:]))
    return replace(slot, in_layer=_is_full)


_SHARED_EXPERT = (
    *(
        replace(slot, hugging_face=tuple(name.replace("experts", "expert") for name in slot.hugging_face))
        for slot in SHARED_EXPERT
    ),
    replace(
        SHARED_EXPERT[1],
        megatron=r"mlp\.shared_experts\.gate_weight",
        hugging_face=("mlp.shared_expert_gate.weight",),
        layout=REPLICATED,
        sizes=("one hidden",),
    ),
)
LAYER = tuple(
    replace(slot, prefix=_PREFIX + "layers.{layer}.")
    for slot in (
        replace(INPUT_NORM, megatron=rf"{INPUT_NORM.megatron}|self_attention\.in_proj\.layer_norm_weight"),
        *_DELTA_NET,
        *(_attention(slot) for slot in ATTENTION if slot not in (INPUT_NORM, POST_ATTENTION_NORM)),
        POST_ATTENTION_NORM,
        *DENSE_MLP,
        *experts(),
        *_SHARED_EXPERT,
    )
)
"""A layer: transformers' Qwen3_5DecoderLayer, or Qwen3_5MoeDecoderLayer."""

_SIZES = {
    "linear_attention_freq": _INTERVAL,
    **{key: key for key in ("linear_num_key_heads", "linear_num_value_heads")},
    **{key: key for key in ("linear_key_head_dim", "linear_value_head_dim")},
}
_EXPERTS = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
_DEFAULTS: dict[str, object] = {
    **{"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
_DEFAULTS_OF_EXPERTS: dict[str, object] = {
    **{"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
_family: Callable[..., Family] = partial(
    Family,
    layer=LAYER,
    outside=Outside(
        replace(EMBEDDING, hugging_face=(f"{_PREFIX}embed_tokens.weight",)),
        replace(FINAL_NORM, hugging_face=(f"{_PREFIX}norm.weight",)),
        OUTPUT,
    ),
    fits=lambda model: model.linear_attention_freq is not None,
    complete=_complete,
    stored=_stored,
    predicting=lambda _model: r"(?:mtp|model\.visual)\..+",
    refusals=(
        OUTPUT_BIAS,
        Refusal("attn_output_gate", (True, None), "attention without output gates is not supported"),
        Refusal("linear_conv_kernel_dim", (MAMBA_TAPS, None), f"only {MAMBA_TAPS} taps are supported"),
        Refusal("mlp_only_layers", ([], (), None), "layers without experts are not supported"),
    ),
    write=_write,
    problems=_problems,
)
_VARIED: Any = ("linear_attention_freq",)
FAMILIES = (
    _family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        fields={"qk_layernorm": True},
        varied=_VARIED,
        sizes=_SIZES,
        defaults=_DEFAULTS,
    ),
    _family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        fields={"qk_layernorm": True, "moe_router_pre_softmax": False},
        varied=(*_VARIED, "moe_shared_expert_intermediate_size"),
        sizes=_SIZES | _EXPERTS,
        defaults=_DEFAULTS | _DEFAULTS_OF_EXPERTS,
    ),
)
