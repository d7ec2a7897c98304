"""Between the `config.json` of a Hugging Face model and `ModelConfig`; plain data, neither torch nor transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from pydantic import ValidationError

from nemo_rl_mcore.config.base import ConfigError, Problem, collect_problems
from nemo_rl_mcore.config.model import ModelConfig, RopeScalingConfig

HFConfig = Mapping[str, object]

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_EXPERT_SIZES = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_OPTIONS = {
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}
_DEFAULTS: HFConfig = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings")
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3}
_YARN_KEYS = {*_ROPE_KEYS, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}


@dataclass(frozen=True)
class Refusal:
    """A key of config.json whose other values ask for what is not there."""

    key: str
    allowed: tuple[object, ...]
    reason: str


_REFUSALS = (
    Refusal("hidden_act", ("silu", "swish", None), "only SiLU is supported"),
    Refusal("attention_dropout", (0, None), "attention dropout is not supported"),
    Refusal("partial_rotary_factor", (1, None), "rotary positions on a part of each head are not supported"),
    Refusal("per_layer_config", (None, {}), "layers that differ from each other are not supported"),
    Refusal("quantization_config", (None,), "quantised weights are not supported"),
)
_OUTPUT_BIAS = Refusal("attention_bias", (False, None), "a bias on the attention's output is not supported")
_MLP_BIAS = Refusal("mlp_bias", (False, None), "a bias in the feed-forward layers is not supported")
_WINDOW_SWITCH = Refusal("use_sliding_window", (False, None), "sliding-window attention is not supported")
_WINDOW = Refusal("sliding_window", (None,), "sliding-window attention is not supported")
_DENSE_LAYERS = (
    Refusal("decoder_sparse_step", (1, None), "dense layers between layers of experts are not supported"),
    Refusal("mlp_only_layers", ([], (), None), "dense layers between layers of experts are not supported"),
)


@dataclass(frozen=True)
class Family:
    """A `model_type`: what its layers have, what config.json may leave out, and what is refused."""

    model_type: str
    architecture: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    experts: bool = False
    refusals: tuple[Refusal, ...] = ()
    defaults: HFConfig = field(default_factory=dict[str, object])
    """transformers' values of the keys that config.json leaves out, where they are not those of every family."""


_QWEN_HEADS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            refusals=(_OUTPUT_BIAS, _MLP_BIAS),
            defaults={"max_position_embeddings": 2048},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            refusals=(_WINDOW,),
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 4096 * 32,
                "sliding_window": 4096,
            },
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            add_qkv_bias=True,
            refusals=(_WINDOW_SWITCH,),
            defaults=_QWEN_HEADS,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            qk_layernorm=True,
            refusals=(_OUTPUT_BIAS, _WINDOW_SWITCH),
            defaults={**_QWEN_HEADS, "head_dim": 128},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_layernorm=True,
            experts=True,
            refusals=(_OUTPUT_BIAS, _WINDOW_SWITCH, *_DENSE_LAYERS),
            defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "norm_topk_prob": False},
        ),
    )
}


def model_config_from_hf(config: HFConfig) -> ModelConfig:
    """Return the architecture that a config.json describes.

    Raises ConfigError with every unknown family, unsupported feature or missing key; paths are keys of config.json.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            [Problem("not-supported", "model_type", f"{model_type!r} is not supported", f"known: {known}")]
        )
    values = {**_DEFAULTS, **family.defaults, **config}
    if values.get("num_local_experts") is not None:  # the newer spelling, which counts where a file has both
        values["num_experts"] = values["num_local_experts"]
    rope = _rope(values)
    problems = [
        *_hidden_base(values, rope),
        *_feature_problems(family, values),
        *_rope_problems(family, rope),
        *_router_problems(family, values),
        *_missing(family, values),
    ]
    if problems:
        raise ConfigError(problems)
    return _model_config(family, values, rope)


def _rope(values: HFConfig) -> dict[str, object]:
    """Return base, type and factors of the rotary positions.

    transformers 5 writes `rope_parameters`; where a file has `rope_scaling` too, as model cards say to add, that one
    counts alone (`convert_rope_params_to_dict` in its modeling_rope_utils.py).
    """
    section = values.get("rope_scaling") or values.get("rope_parameters")
    given = dict(cast("HFConfig", section)) if isinstance(section, Mapping) else {}
    kind = given.get("rope_type") or given.get("type") or "default"
    return {"rope_theta": values["rope_theta"], **given, "rope_type": kind}


def _hidden_base(values: HFConfig, rope: HFConfig) -> Iterator[Problem]:
    other = values.get("rope_parameters")
    base = cast("HFConfig", other).get("rope_theta") if isinstance(other, Mapping) else None
    if base is not None and base != rope["rope_theta"]:
        yield Problem(
            "contradicts",
            "rope_scaling.rope_theta",
            f"{rope['rope_theta']!r} counts, and rope_parameters.rope_theta: {base!r} does not",
            "write the base that is meant in both",
        )


def _feature_problems(family: Family, values: HFConfig) -> Iterator[Problem]:
    for refusal in (*_REFUSALS, *family.refusals):
        given = values.get(refusal.key)
        if given not in refusal.allowed:
            yield Problem(
                "not-supported", refusal.key, f"{given!r} of a {family.model_type} model: {refusal.reason}"
            )
    kinds = values.get("layer_types") or ()
    foreign = sorted({str(kind) for kind in cast("list[object]", kinds)} - {"full_attention"})
    if foreign:
        yield Problem(
            "not-supported",
            "layer_types",
            f"{foreign} of a {family.model_type} model: only full_attention is supported",
        )


def _rope_problems(family: Family, rope: HFConfig) -> Iterator[Problem]:
    kind = rope["rope_type"]
    if kind not in _NEEDED:
        yield Problem(
            "not-supported",
            "rope_type",
            f"{kind!r} of a {family.model_type} model is not supported",
            f"known: {', '.join(_NEEDED)}",
        )
    elif foreign := sorted(rope.keys() - (_YARN_KEYS if kind == "yarn" else _ROPE_KEYS)):
        yield Problem(
            "not-supported", "rope_parameters", f"{foreign} of a {family.model_type} model are not supported"
        )
    if rope.get("partial_rotary_factor") not in (1, None):
        yield Problem(
            "not-supported",
            "partial_rotary_factor",
            "rotary positions on a part of each head are not supported",
        )
    for key in _NEEDED.get(str(kind), ()):
        if key not in rope:
            yield Problem("missing", f"rope_scaling.{key}", f"missing, and rope_type {kind} needs it")
    for key, allowed in _OF_YARN.items():
        if kind == "yarn" and rope.get(key) not in allowed:
            what = (
                f"{rope[key]!r} of a {family.model_type} model: engines and training would read it otherwise"
            )
            yield Problem("not-supported", f"rope_scaling.{key}", what, "known: the default")


_NEEDED: Mapping[str, tuple[str, ...]] = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_OF_YARN: Mapping[str, tuple[object, ...]] = {
    "truncate": (None, True),
    "mscale": (None, 1),
    "mscale_all_dim": (None, 0),
}
"""Keys that change a model of latent attention; with these values they change none."""


def _router_problems(family: Family, values: HFConfig) -> Iterator[Problem]:
    # ModelConfig refuses it too, in words for a model of one's own: here the architecture is that of the weights.
    if family.experts and values.get("num_experts_per_tok") == 1 and values["norm_topk_prob"]:
        yield Problem(
            "no-signal",
            "num_experts_per_tok",
            f"1 of a {family.model_type} model with norm_topk_prob: {values['norm_topk_prob']} gives every expert the "
            "share 1, so that the router has no gradient",
            "use a model with norm_topk_prob: false, or with more experts per token",
        )


def _missing(family: Family, values: HFConfig) -> Iterator[Problem]:
    for key in (_SIZES | (_EXPERT_SIZES if family.experts else {})).values():
        if values.get(key) is None:
            yield Problem("missing", key, f"missing, and a {family.model_type} model has it")


def _model_config(family: Family, values: HFConfig, rope: HFConfig) -> ModelConfig:
    keys = _SIZES | _OPTIONS | (_EXPERT_SIZES if family.experts else {})
    fields = {name: values[key] for name, key in keys.items()}
    fields |= {
        "rotary_base": rope["rope_theta"],
        "qk_layernorm": family.qk_layernorm,
        "add_qkv_bias": family.add_qkv_bias,
    }
    if rope["rope_type"] != "default":
        known = RopeScalingConfig.model_fields
        fields["rope_scaling"] = {
            key: value for key, value in rope.items() if key in known and value is not None
        }
    if family.experts:
        # Scores that are made to sum to 1 after the selection are a softmax over the selected experts.
        fields["moe_router_pre_softmax"] = not values["norm_topk_prob"]
    try:
        model = ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_translated(error, keys)) from error
    if problems := [Problem(problem.code, "", str(problem)) for problem in collect_problems(model)]:
        raise ConfigError(problems)  # sizes that do not go together, which they name themselves
    return model


def _translated(error: ValidationError, keys: Mapping[str, str]) -> Iterator[Problem]:
    for details in error.errors(include_url=False):
        path = ".".join(str(part) for part in details["loc"])
        yield Problem("not-allowed", keys.get(path, path), f"{details['input']!r}: {details['msg']}")


def family_of(model: ModelConfig) -> Family:
    """Return the family that an architecture is saved as; ValueError says what no family has."""
    if reason := missing_family(model):
        raise ValueError(reason)
    return next(family for family in FAMILIES.values() if _features(family) == _features_of(model))


def missing_family(model: ModelConfig) -> str:
    """Return why no family has this architecture; empty where one has it."""
    foreign = [f"policy.model.{feature}" for feature in _foreign_features(model)]
    wanted = _features_of(model)
    if not foreign and not any(_features(family) == wanted for family in FAMILIES.values()):
        names = ("add_qkv_bias", "qk_layernorm", "num_moe_experts")
        having = [f"{name} {'set' if has else 'off'}" for name, has in zip(names, wanted, strict=True)]
        foreign = [f"policy.model.{feature}" for feature in having]
    known = ", ".join(FAMILIES)
    return (
        f"no supported Hugging Face family has {' with '.join(foreign)} (known: {known})" if foreign else ""
    )


def _features(family: Family) -> tuple[bool, bool, bool]:
    return family.add_qkv_bias, family.qk_layernorm, family.experts


def _features_of(model: ModelConfig) -> tuple[bool, bool, bool]:
    return model.add_qkv_bias, model.qk_layernorm, model.num_moe_experts is not None


def _foreign_features(model: ModelConfig) -> Iterator[str]:
    if model.mtp_num_layers:
        yield f"mtp_num_layers: {model.mtp_num_layers}"
    if model.num_moe_experts is None:
        return
    if model.moe_shared_expert_intermediate_size:
        yield f"moe_shared_expert_intermediate_size: {model.moe_shared_expert_intermediate_size}"
    if model.moe_router_score_function != "softmax":
        yield f"moe_router_score_function: {model.moe_router_score_function}"


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_config_of(
    model: ModelConfig, *, dtype: str = "float32", origin: HFConfig | None = None
) -> dict[str, object]:
    """Return the config.json of an architecture; ValueError where no family has it.

    origin: the config.json that the architecture came from, if any; its family, its special tokens and what it says of
    training stay.
    """
    origin = origin or {}
    family = FAMILIES.get(str(origin.get("model_type"))) or family_of(model)
    rope: dict[str, object] = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope |= {"rope_type": scaling.rope_type, **{key: getattr(scaling, key) for key in scaling.keys}}
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        **{key: getattr(model, name) for name, key in (_SIZES | _OPTIONS).items()},
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": origin.get("initializer_range", model.init_method_std),
        "rope_parameters": rope,
        # The same where transformers 4 looks for it: it would silently take the default.
        "rope_theta": model.rotary_base,
        "rope_scaling": rope if model.rope_scaling else None,
        **{key: origin.get(key) for key in _TOKENS},
        **{refusal.key: refusal.allowed[0] for refusal in family.refusals},
    }
    return config | (_expert_keys(model, origin) if family.experts else {})


def _expert_keys(model: ModelConfig, origin: HFConfig) -> dict[str, object]:
    return {
        **{key: getattr(model, name) for name, key in _EXPERT_SIZES.items()},
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
    }
