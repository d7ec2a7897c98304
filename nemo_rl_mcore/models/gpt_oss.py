"""gpt-oss: sliding windows in every other layer, attention sinks, and experts with biases and clamped gates."""

from collections.abc import Iterator, Mapping
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models.family import Family, HFConfig, Refusal
from nemo_rl_mcore.models.weights import (
    ATTENTION,
    INTERLEAVED,
    REPLICATED,
    ROUTER_WEIGHT,
    TRANSPOSED,
    slots,
)

_WINDOW, _FULL = "sliding_attention", "full_attention"
_KINDS, _SIZE = "layer_types", "sliding_window"
_MXFP4 = "mxfp4"
_SCALING: Mapping[str, object] = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}
"""transformers' default rotary scaling."""


def _complete(values: HFConfig) -> Mapping[str, object]:
    """Return transformers' defaults for layer types and rotary scaling that config.json omits."""
    found: dict[str, object] = {}
    layers = values.get("num_hidden_layers")
    if not values.get(_KINDS) and isinstance(layers, int):
        found[_KINDS] = _kinds(layers, windows=True)
    if not values.get("rope_parameters") and not values.get("rope_scaling"):
        found["rope_scaling"] = _SCALING
    quantized = values.get("quantization_config")
    if isinstance(quantized, Mapping) and cast("HFConfig", quantized).get("quant_method") == _MXFP4:
        found["quantization_config"] = None  # quantization is detected when the files are read
    return found


def _kinds(layers: int, *, windows: bool) -> list[str]:
    return [_WINDOW if windows and layer % 2 == 0 else _FULL for layer in range(layers)]


def _problems(values: HFConfig) -> Iterator[Problem]:
    kinds, layers = cast("list[str]", values.get(_KINDS) or []), values.get("num_hidden_layers")
    if foreign := sorted({*kinds} - {_WINDOW, _FULL}):
        what = f"{quoted(foreign)} of a gpt_oss model"
        yield Problem("not-supported", _KINDS, what, f"known: {_WINDOW}, {_FULL}")
    elif isinstance(layers, int) and len(kinds) != layers:
        what = f"{len(kinds)} kinds for {layers} layers of a gpt_oss model"
        yield Problem("contradicts", _KINDS, what, "write one for each layer", ("num_hidden_layers",))
    elif kinds != _kinds(len(kinds), windows=_WINDOW in kinds):
        what = f"a gpt_oss model has windows in every other layer, from the first: {quoted(kinds)} is not supported"
        yield Problem("not-supported", _KINDS, what)
    if _WINDOW in kinds and values.get(_SIZE) is None:
        yield Problem("missing", _SIZE, f"missing, and {_KINDS} of a gpt_oss model has {_WINDOW}")


def _write(model: ModelConfig, origin: HFConfig) -> Mapping[str, object]:
    return {
        "intermediate_size": model.shape.expert_ffn_size,
        _KINDS: _kinds(model.num_layers, windows=model.sliding_window is not None),
        _SIZE: model.sliding_window or origin.get(_SIZE) or _DEFAULTS[_SIZE],
        "swiglu_limit": model.activation_func_clamp_value,
        "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
    }


# Either a module per expert, or one module with numbered weights.
_numbered = r"mlp\.experts\.(?:local_experts\.(\d+)\.{0}|{0}(\d+))".format
LAYER = (
    *ATTENTION,
    *slots(
        (ROUTER_WEIGHT, "mlp.router.weight", REPLICATED, "experts hidden"),
        (r"mlp\.router\.bias", "mlp.router.bias", REPLICATED, "experts"),
    ),
    *slots(
        (_numbered(r"linear_fc1\.weight"), "gate_up_proj", INTERLEAVED, "hidden expert_twice"),
        (_numbered(r"linear_fc1\.bias"), "gate_up_proj_bias", INTERLEAVED, "expert_twice"),
        (_numbered(r"linear_fc2\.weight"), "down_proj", TRANSPOSED, "expert hidden"),
        (_numbered(r"linear_fc2\.bias"), "down_proj_bias", REPLICATED, "hidden"),
        named="mlp.experts.{}",
        of_expert=True,
        stacked=True,
    ),
)
"""A layer: transformers' GptOssDecoderLayer."""

_DEFAULTS: HFConfig = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}

FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    fields={
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "moe_router_pre_softmax": False,
    },
    varied=("sliding_window",),
    sizes={
        "num_moe_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "activation_func_clamp_value": "swiglu_limit",
    },
    aliases={"num_experts": "num_local_experts"},
    layer=LAYER,
    complete=_complete,
    fits=lambda model: model.activation_func_clamp_value is not None,
    defaults=_DEFAULTS,
    refusals=(
        Refusal("attention_bias", (True, None), "attention without biases is not supported"),
        Refusal("swiglu_alpha", (1.702, None), "other slopes of gates are not supported"),
    ),
    read=lambda values: {
        "sliding_window": values[_SIZE] if _WINDOW in cast("list[str]", values.get(_KINDS) or []) else None
    },
    write=_write,
    problems=_problems,
)
