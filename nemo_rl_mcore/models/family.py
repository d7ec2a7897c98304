"""Description of a model family; `models/__init__.py` lists all families.

A family with existing layer types is an entry in `decoders.py`. A new layer type also needs fields in
`config/model.py`, weights in `models/weights.py`, and Megatron modules in `rank/megatron/layer_specs.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.weights import LAYER, OUTSIDE, Outside, Slot, Stored

HFConfig = Mapping[str, object]


@dataclass(frozen=True)
class Refusal:
    """A key of config.json with its supported values; other values are refused."""

    key: str
    allowed: tuple[object, ...]
    reason: str


OUTPUT_BIAS = Refusal("attention_bias", (False, None), "a bias on the attention's output is not supported")
MLP_BIAS = Refusal("mlp_bias", (False, None), "a bias in the feed-forward layers is not supported")
WINDOW_SWITCH = Refusal("use_sliding_window", (False, None), "sliding-window attention is not supported")
WINDOW = Refusal("sliding_window", (None,), "sliding-window attention is not supported")

_FEATURES: Mapping[str, object] = {
    **{"add_qkv_bias": False, "add_bias_linear": False, "qk_layernorm": False, "mtp_num_layers": None},
    **{"softmax_type": "vanilla", "sliding_window": None},
    **{"activation_func": "silu", "kv_lora_rank": None, "linear_attention_freq": None},
}
_FEATURES_OF_EXPERTS: Mapping[str, object] = {
    "moe_shared_expert_intermediate_size": None,
    "moe_latent_size": None,
    "moe_layer_freq": None,
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
}
EXPERTS = "num_moe_experts"


@dataclass(frozen=True)
class Family:
    """A `model_type`: the features of its layers, its keys in config.json, and refused values.

    fields: values of ModelConfig that all its models share and that differ from a Llama. fields_of_experts: the same
    for MoE models, in a family that also has dense ones. varied: distinguishing fields that may differ among its
    models. fits: returns True for a model that can be written as the family's config.json.
    sizes: further fields of ModelConfig with their keys in config.json. aliases: alternative keys, which take
    precedence if a file has both. defaults: transformers' defaults for missing keys, where they differ from those
    common to all families. complete: function that derives keys from others.
    layer, outside: the weights. predicting: regular expression for skipped tensors of layers that predict further
    tokens, or of parts for other inputs than text. stored: for files with other names or stacked experts; None if files
    have the tensors of the table. hybrid: true if its models have a layer pattern, with or without experts.
    read, write: conversions beyond a change of key between config.json and ModelConfig; write also receives the
    original config.json. problems: function that yields problems beyond refusals of single keys.
    """

    model_type: str
    architecture: str
    fields: dict[str, object] = field(default_factory=dict[str, object])
    fields_of_experts: HFConfig = field(default_factory=dict[str, object])
    varied: tuple[str, ...] = ()
    fits: Callable[[ModelConfig], bool] = lambda _model: True
    sizes: dict[str, str] = field(default_factory=dict[str, str])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    layer: tuple[Slot, ...] = LAYER
    outside: Outside = OUTSIDE
    hybrid: bool = False
    complete: Callable[[HFConfig], Mapping[str, object]] = lambda _values: {}
    predicting: Callable[[ModelConfig], str] | None = None
    stored: Stored | None = None
    defaults: HFConfig = field(default_factory=dict[str, object])
    refusals: tuple[Refusal, ...] = ()
    read: Callable[[HFConfig], Mapping[str, object]] = lambda _values: {}
    write: Callable[[ModelConfig, HFConfig], Mapping[str, object]] = lambda _model, _origin: {}
    problems: Callable[[HFConfig], Iterable[Problem]] = lambda _values: ()

    def has(self, model: ModelConfig) -> bool:
        features = features_of(model)
        if not self.fits(model) or self.hybrid != (model.hybrid_layer_pattern is not None):
            return False
        if not self.hybrid and (EXPERTS in features) != (EXPERTS in self.sizes):
            return False
        own = {**self.fields, **(self.fields_of_experts if EXPERTS in features else {})}
        if features.keys() - own.keys() - {EXPERTS, *self.varied}:
            return False
        return all(getattr(model, key) == own[key] for key in own.keys() - {*self.varied})


def features_of(model: ModelConfig) -> dict[str, object]:
    """Return those of the fields that distinguish families which differ from a Llama's."""
    usual = _FEATURES
    if model.num_moe_experts is not None:
        usual = {EXPERTS: None, **usual, **_FEATURES_OF_EXPERTS}
    return {name: getattr(model, name) for name, value in usual.items() if getattr(model, name) != value}
