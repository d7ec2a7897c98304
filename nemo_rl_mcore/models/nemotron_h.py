"""Nemotron-H, Nano v2, Nemotron 3 Nano and Super: Mamba-2 layers, attention without positions, and squared ReLUs.

Each layer has a norm and a mixer, given by a character in `hybrid_override_pattern` or a word in `layers_block_type`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MAMBA_NORM_EPSILON,
    MAMBA_TAPS,
    MLP,
    ModelConfig,
)
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models.family import MLP_BIAS, OUTPUT_BIAS, WINDOW, Family, HFConfig, Refusal
from nemo_rl_mcore.models.weights import ATTENTION as LLAMA_ATTENTION
from nemo_rl_mcore.models.weights import (
    COLUMNS,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    GATED,
    OUTPUT,
    ROWS,
    SHARED_EXPERT,
    Layout,
    Outside,
    Slot,
    experts,
    mamba_convolved,
    mamba_projected,
    slots,
)

_PATTERN, _WORDS, _LAYERS = "hybrid_override_pattern", "layers_block_type", "num_hidden_layers"
_KINDS = {
    **{"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": MLP, "moe": EXPERTS},
    **{"mamba": MAMBA, "attention": ATTENTION},  # before transformers 5.10
}
_PREFIX = "backbone.layers.{layer}."
_OF_EXPERTS: Mapping[str, object] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_SHORTEST_STEP = 1e-12
"""Minimum time step for config.json: transformers clamps time steps to the minimum, Megatron and vLLM do not."""
_BIAS = "a bias in the projections of Mamba layers is not supported"


def _complete(values: HFConfig) -> Mapping[str, object]:
    """Return the layer pattern and its length, if config.json has words or characters for it."""
    pattern = cast("str | None", values.get(_PATTERN))
    if words := cast("Sequence[str]", values.get(_WORDS) or values.get("layer_types") or ()):
        pattern = "".join(_KINDS.get(word, "?") for word in words)
    return {} if pattern is None else {_PATTERN: pattern, _LAYERS: len(pattern)}


def _problems(values: HFConfig) -> Iterator[Problem]:
    """Yield unknown layers, missing keys of experts, and expert weights that Megatron computes differently."""
    words = cast("Sequence[str]", values.get(_WORDS) or values.get("layer_types") or ())
    if foreign := sorted({*words} - _KINDS.keys()):
        what = f"{quoted(foreign)} of a nemotron_h model"
        yield Problem("not-supported", _WORDS, what, f"known: {', '.join(_KINDS)}")
    if EXPERTS not in str(values.get(_PATTERN)):
        return
    for key in _EXPERTS.values():
        if values.get(key) is None:
            yield Problem("missing", key, "missing, and a nemotron_h model with layers of experts (E) has it")
    chosen, shares = values.get("num_experts_per_tok"), values.get("norm_topk_prob")
    if (chosen != 1) != bool(shares):
        what = f"{shares!r} of a nemotron_h model with num_experts_per_tok: {chosen}"
        reason = (
            "weights of several experts are normalised to sum to 1, and that of a single expert is its score"
        )
        yield Problem("not-supported", "norm_topk_prob", f"{what}: {reason}")
    for key in ("n_group", "topk_group", "n_shared_experts"):
        if values.get(key) not in (1, None):
            what = f"{values[key]!r} of a nemotron_h model with layers of experts (E): only 1 is supported"
            yield Problem("not-supported", key, what)


def _read(values: HFConfig) -> Mapping[str, object]:
    """Return the experts' fields if there are experts; transformers writes their keys into every config.json."""
    if EXPERTS not in str(values[_PATTERN]):
        return {}
    scale = values.get("routed_scaling_factor")
    return {
        **_OF_EXPERTS,
        **{name: values[key] for name, key in _EXPERTS.items()},
        "moe_router_topk_scaling_factor": None if scale == 1 else scale,
        "moe_latent_size": values.get("moe_latent_size"),
    }


def _write(model: ModelConfig, origin: HFConfig) -> Mapping[str, object]:
    """Return the layers, and initialization keys that cannot be derived from the weights."""
    words = {kind: word for word, kind in reversed(_KINDS.items())}
    kept = ("chunk_size", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
    written: dict[str, object] = {
        "time_step_min": _SHORTEST_STEP,
        "num_nextn_predict_layers": 0,
        _WORDS: [words[kind] for kind in model.hybrid_layer_pattern or ""],
        **{key: origin[key] for key in kept if key in origin},
    }
    if model.num_moe_experts is not None:
        written |= {
            **{key: getattr(model, name) for name, key in _EXPERTS.items()},
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "norm_topk_prob": model.moe_router_topk > 1,
            "moe_intermediate_size": model.shape.expert_ffn_size,
            "moe_latent_size": model.moe_latent_size,
            **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
        }
    return written


def _in(kind: str) -> Callable[[ModelConfig, int], bool]:
    return lambda model, layer: (model.hybrid_layer_pattern or "")[layer] == kind


def _norm(kind: str, megatron: str) -> Slot:
    names = ("norm.weight",)
    return replace(FINAL_NORM, megatron=megatron, hugging_face=names, in_layer=_in(kind), prefix=_PREFIX)


_PROJECTED, _CONVOLVED = Layout(0, sections=mamba_projected), Layout(0, sections=mamba_convolved)
_MAMBA = (
    _norm(MAMBA, r"norm\.weight|mixer\.in_proj\.layer_norm_weight"),
    *slots(
        (r"in_proj\.weight", "in_proj.weight", _PROJECTED, "mamba_projected hidden"),
        (r"conv1d[._]weight", "conv1d.weight", _CONVOLVED, "mamba_convolved one mamba_taps"),
        (r"conv1d[._]bias", "conv1d.bias", _CONVOLVED, "mamba_convolved"),
        *((name, f"{name}", ROWS, "mamba_heads") for name in ("A_log", "D", "dt_bias")),
        (r"norm\.weight", "norm.weight", ROWS, "mamba"),
        (r"out_proj\.weight", "out_proj.weight", COLUMNS, "hidden mamba"),
        within=r"mixer\.",
        named="mixer.{}",
        in_layer=_in(MAMBA),
        prefix=_PREFIX,
    ),
)


def _mixer(kind: str, slots: Iterable[Slot]) -> Iterator[Slot]:
    """Yield a Llama layer's weights, adapted to a layer of the given kind, without gates."""
    for slot in slots:
        names = tuple(re.sub(r"(self_attn|mlp)\.", "mixer.", name, count=1) for name in slot.hugging_face)
        changed = replace(slot, hugging_face=names, in_layer=_in(kind), prefix=_PREFIX)
        if slot.layout is GATED:
            changed = replace(changed, hugging_face=names[1:], layout=ROWS, sizes=slot.sizes[1:])
        yield changed


_BEFORE_FEED_FORWARD = r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight"
_LAYER = (
    *_MAMBA,
    _norm(ATTENTION, r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight"),
    *_mixer(ATTENTION, (slot for slot in LLAMA_ATTENTION if slot.hugging_face[0].startswith("self_attn."))),
    _norm(MLP, _BEFORE_FEED_FORWARD),
    *_mixer(MLP, DENSE_MLP),
    _norm(EXPERTS, _BEFORE_FEED_FORWARD),
    *_mixer(EXPERTS, (*experts(), *SHARED_EXPERT)),
)
_EXPERTS = {
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}

FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    fields={"activation_func": "squared_relu"},
    sizes={
        "hybrid_layer_pattern": _PATTERN,
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_state_dim": "ssm_state_size",
        "mamba_num_groups": "n_groups",
        "layernorm_epsilon": "layer_norm_epsilon",
    },
    aliases={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
    },
    layer=_LAYER,
    outside=Outside(
        replace(EMBEDDING, hugging_face=("backbone.embeddings.weight",)),
        replace(FINAL_NORM, hugging_face=("backbone.norm_f.weight",)),
        OUTPUT,
    ),
    hybrid=True,
    fields_of_experts=_OF_EXPERTS,
    varied=("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_router_topk_scaling_factor"),
    predicting=lambda _model: r"mtp\..+",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": MAMBA_TAPS,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    refusals=(
        OUTPUT_BIAS,
        MLP_BIAS,
        Refusal("tie_word_embeddings", (False, None), "transformers ties the embeddings of no such model"),
        WINDOW,
        Refusal("mlp_hidden_act", ("relu2",), "only the squared ReLU is supported"),
        Refusal("mamba_hidden_act", ("silu", "swish", None), "only SiLU is supported"),
        Refusal("conv_kernel", (MAMBA_TAPS,), f"only {MAMBA_TAPS} taps of the convolution are supported"),
        Refusal("use_conv_bias", (True,), "a convolution without bias is not supported"),
        Refusal("use_bias", (False, None), _BIAS),
        Refusal("mamba_proj_bias", (False, None), _BIAS),
        Refusal(
            "layer_norm_epsilon",
            (MAMBA_NORM_EPSILON,),
            "Megatron's norm after the scan always has this epsilon",
        ),
        Refusal("residual_in_fp32", (False, None), "residuals in another number format are not supported"),
        Refusal("hidden_dropout", (0, None), "dropout is not supported"),
    ),
    complete=_complete,
    read=_read,
    write=_write,
    problems=_problems,
)
