"""A family of models, as the modules of this package describe each; `models/__init__.py` lists them.

A family of layers that exist is an entry of `decoders.py`. A new kind of layer also needs fields in `config/model.py`,
its weights (`models/weights.py`), and what Megatron builds for it (`rank/megatron/layer_specs.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.weights import LAYER, OUTSIDE, Outside, Slot

HFConfig = Mapping[str, object]


@dataclass(frozen=True)
class Refusal:
    """A key of config.json whose other values ask for what is not there."""

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
    **{"activation_func": "silu", "kv_lora_rank": None},
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
    """A `model_type`: what its layers have, what config.json says of them, and what is refused.

    fields: of ModelConfig, that all its models share, where they differ from a Llama. fields_of_experts: the same of
    models with experts, where a family has some with and some without. varied: fields that tell families apart, and
    that its models have or not. fits: a model with those can be written as a config.json of the family.
    sizes: fields of ModelConfig and the keys of config.json that give them, besides those of every family. aliases:
    other spellings of keys, which count where a file has both. defaults: transformers' values of keys that are left
    out, where they are not those of every family. complete: keys that follow from others.
    layer, outside: the weights. predicting: a regular expression of tensors that are left out, of layers that predict
    further tokens. hybrid: its models have a pattern of layers, and with it experts or none. windows: `layer_types` of
    its config.json may name layers with a window.
    read, write: what takes more than a name between config.json and ModelConfig; write gets the config.json that the
    weights came from, too. problems: what of a config.json no refusal of a key can say.
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
    windows: bool = False
    complete: Callable[[HFConfig], Mapping[str, object]] = lambda _values: {}
    predicting: Callable[[ModelConfig], str] | None = None
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

    @property
    def rotary(self) -> bool:
        return not self.hybrid


def features_of(model: ModelConfig) -> dict[str, object]:
    """Return the fields by which families are told apart, where they are not those of a Llama."""
    usual = _FEATURES
    if model.num_moe_experts is not None:
        usual = {EXPERTS: None, **usual, **_FEATURES_OF_EXPERTS}
    return {name: getattr(model, name) for name, value in usual.items() if getattr(model, name) != value}
