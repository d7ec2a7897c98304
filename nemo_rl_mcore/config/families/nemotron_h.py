"""Nemotron-H and Nemotron Nano v2: hybrids of Mamba-2, attention without positions, and squared-ReLU layers.

Each layer has one norm and one mixer; `hybrid_override_pattern` says which, in a character each, or
`layers_block_type`, in words.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.families.family import MLP_BIAS, OUTPUT_BIAS, WINDOW, Family, HFConfig, Refusal
from nemo_rl_mcore.config.families.weights import (
    ATTENTION_PROJECTIONS,
    COLUMNS,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    REPLICATED,
    ROWS,
    Layout,
    Outside,
    Shapes,
    Slot,
)
from nemo_rl_mcore.config.hybrid_layers import ATTENTION, EXPERTS, MAMBA, MLP
from nemo_rl_mcore.config.model import MAMBA_NORM_EPSILON, MAMBA_TAPS, ModelConfig

_PATTERN, _WORDS, _LAYERS = "hybrid_override_pattern", "layers_block_type", "num_hidden_layers"
_KINDS = {
    **{"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": MLP, "moe": EXPERTS},
    **{"mamba": MAMBA, "attention": ATTENTION},  # before transformers 5.10
}
_PREFIX = "backbone.layers.{layer}."
_BIAS = "a bias in the projections of Mamba layers is not supported"


def _complete(values: HFConfig) -> Mapping[str, object]:
    """Return the pattern and the number of its layers, where words or characters give them."""
    words, pattern = values.get(_WORDS) or values.get("layer_types"), values.get(_PATTERN)
    if isinstance(words, Sequence) and not isinstance(words, str):
        pattern = "".join(_KINDS.get(str(word), "?") for word in cast("Sequence[object]", words))
    if not isinstance(pattern, str):
        return {}
    return {_PATTERN: pattern, _LAYERS: len(pattern)}


def _problems(values: HFConfig) -> Iterator[Problem]:
    words = values.get(_WORDS) or values.get("layer_types") or ()
    if foreign := sorted({str(word) for word in cast("Sequence[object]", words)} - _KINDS.keys()):
        yield Problem(
            "not-supported", _WORDS, f"{foreign} of a nemotron_h model", f"known: {', '.join(_KINDS)}"
        )
    if EXPERTS in str(values.get(_PATTERN)):
        yield Problem(
            "not-supported", _PATTERN, "layers of experts (E) of a nemotron_h model are not supported"
        )


def _write(model: ModelConfig, origin: HFConfig) -> Mapping[str, object]:
    """Return the layers, and what of the model's start the weights do not tell."""
    pattern = model.hybrid_layer_pattern or ""
    words = {kind: word for word, kind in reversed(_KINDS.items())}
    kept = ("chunk_size", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
    return {
        _WORDS: [words[kind] for kind in pattern],
        **{key: origin[key] for key in kept if key in origin},
    }


def _in(kind: str) -> Callable[[ModelConfig, int], bool]:
    return lambda model, layer: (model.hybrid_layer_pattern or "")[layer] == kind


def _keys(model: ModelConfig) -> int:
    return model.mamba_num_groups * model.mamba_state_dim


def _convolved(model: ModelConfig) -> tuple[int, ...]:
    """Rows of values, keys and queries."""
    return model.mamba_size, _keys(model), _keys(model)


def _projected(model: ModelConfig) -> tuple[int, ...]:
    """Rows of the gate, of what is convolved, and of the time steps."""
    return model.mamba_size, *_convolved(model), model.mamba_num_heads or 0


def _vector(size: Callable[[ModelConfig], int]) -> Callable[[ModelConfig], Shapes]:
    return lambda model: ((size(model),),)


def _mamba(megatron: str, tensor: str, layout: Layout, shapes: Callable[[ModelConfig], Shapes]) -> Slot:
    return Slot(
        rf"mixer\.{megatron}", (f"mixer.{tensor}",), layout, shapes, in_layer=_in(MAMBA), prefix=_PREFIX
    )


def _norm(kind: str, megatron: str) -> Slot:
    shapes = _vector(lambda model: model.hidden_size)
    return Slot(megatron, ("norm.weight",), REPLICATED, shapes, in_layer=_in(kind), prefix=_PREFIX)


_HEADS = _vector(lambda model: model.mamba_num_heads or 0)
_MAMBA = (
    _norm(MAMBA, r"norm\.weight|mixer\.in_proj\.layer_norm_weight"),
    _mamba(
        r"in_proj\.weight",
        "in_proj.weight",
        Layout(0, sections=_projected),
        lambda model: ((sum(_projected(model)), model.hidden_size),),
    ),
    _mamba(
        r"conv1d[._]weight",
        "conv1d.weight",
        Layout(0, sections=_convolved),
        lambda model: ((sum(_convolved(model)), 1, MAMBA_TAPS),),
    ),
    _mamba(
        r"conv1d[._]bias",
        "conv1d.bias",
        Layout(0, sections=_convolved),
        _vector(lambda model: sum(_convolved(model))),
    ),
    *(_mamba(name, name, ROWS, _HEADS) for name in ("A_log", "D", "dt_bias")),
    _mamba(r"norm\.weight", "norm.weight", ROWS, _vector(lambda model: model.mamba_size)),
    _mamba(
        r"out_proj\.weight",
        "out_proj.weight",
        COLUMNS,
        lambda model: ((model.hidden_size, model.mamba_size),),
    ),
)
_ATTENTION = (
    _norm(ATTENTION, r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight"),
    *(
        replace(
            slot,
            hugging_face=tuple(name.replace("self_attn.", "mixer.") for name in slot.hugging_face),
            in_layer=_in(ATTENTION),
            prefix=_PREFIX,
        )
        for slot in ATTENTION_PROJECTIONS
    ),
)
_MLP = (
    _norm(MLP, r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight"),
    Slot(
        r"mlp\.linear_fc1\.weight",
        ("mixer.up_proj.weight",),
        ROWS,
        lambda model: ((model.ffn_size, model.hidden_size),),
        in_layer=_in(MLP),
        prefix=_PREFIX,
    ),
    Slot(
        r"mlp\.linear_fc2\.weight",
        ("mixer.down_proj.weight",),
        COLUMNS,
        lambda model: ((model.hidden_size, model.ffn_size),),
        in_layer=_in(MLP),
        prefix=_PREFIX,
    ),
)

FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    fields={"activation_func": "squared_relu", "position_embedding_type": "none"},
    sizes={
        "hybrid_layer_pattern": _PATTERN,
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_state_dim": "ssm_state_size",
        "mamba_num_groups": "n_groups",
        "layernorm_epsilon": "layer_norm_epsilon",
    },
    aliases={
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "norm_eps": "layer_norm_epsilon",
    },
    layer=(*_MAMBA, *_ATTENTION, *_MLP),
    outside=Outside(
        replace(EMBEDDING, hugging_face=("backbone.embeddings.weight",)),
        replace(FINAL_NORM, hugging_face=("backbone.norm_f.weight",)),
        OUTPUT,
    ),
    hybrid=True,
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
    },
    refusals=(
        OUTPUT_BIAS,
        MLP_BIAS,
        Refusal("tie_word_embeddings", (False, None), "transformers ties those of no such model"),
        WINDOW,
        Refusal("mlp_hidden_act", ("relu2",), "only the squared ReLU is supported"),
        Refusal("mamba_hidden_act", ("silu", "swish", None), "only SiLU is supported"),
        Refusal("conv_kernel", (MAMBA_TAPS,), f"only {MAMBA_TAPS} taps of the convolution are supported"),
        Refusal("use_conv_bias", (True,), "a convolution without bias is not supported"),
        Refusal("use_bias", (False, None), _BIAS),
        Refusal("mamba_proj_bias", (False, None), _BIAS),
        Refusal(
            "layer_norm_epsilon", (MAMBA_NORM_EPSILON,), "Megatron's norm behind the scan has this one alone"
        ),
        Refusal("residual_in_fp32", (False, None), "residuals in another number format are not supported"),
        Refusal("hidden_dropout", (0, None), "dropout is not supported"),
        Refusal("num_nextn_predict_layers", (0, None), "layers of multi-token prediction are not supported"),
        Refusal("moe_latent_size", (None,), "experts of a latent size are not supported"),
    ),
    complete=_complete,
    write=_write,
    problems=_problems,
)
