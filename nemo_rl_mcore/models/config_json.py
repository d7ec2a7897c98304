"""Conversion between a Hugging Face model's `config.json` and `ModelConfig`, without torch or transformers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.config.base import ConfigError, PositiveFloat, Problem, Size, collect_problems, refused
from nemo_rl_mcore.config.model import ROPE_TURNS, ModelConfig, RopeScalingConfig
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models import FAMILIES, family_of
from nemo_rl_mcore.models.family import Family, HFConfig, Refusal
from nemo_rl_mcore.models.qwen3_5 import language_part

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
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
_REFUSALS = (
    Refusal("hidden_act", ("silu", "swish", None), "only SiLU is supported"),
    Refusal("attention_dropout", (0, None), "attention dropout is not supported"),
    Refusal("partial_rotary_factor", (1, None), "rotary positions on a part of each head are not supported"),
    Refusal("per_layer_config", (None, {}), "layers that differ from each other are not supported"),
    Refusal("quantization_config", (None,), "quantised weights are not supported"),
)
_Number = Annotated[int, Field(ge=0, le=2_000)]


class _Keys(BaseModel):
    """Keys of config.json that are read but do not correspond to a field of ModelConfig; null keys are dropped."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    layer_types: Annotated[list[str], Field(fail_fast=True)] | None = None
    layers_block_type: Annotated[list[str], Field(fail_fast=True)] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    original_max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: PositiveFloat | None = None
    first_k_dense_replace: _Number | None = None
    moe_latent_size: Size | None = None
    n_group: _Number | None = None
    n_shared_experts: _Number | None = None
    q_lora_rank: Size | None = None
    topk_group: _Number | None = None


_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3}
_YARN_KEYS = {*_ROPE_KEYS, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
_ROPE_NEEDS = {"default": (), "llama3": _LLAMA3, "yarn": ("factor", _ORIGINAL)}
_YARN_DEFAULTS: Mapping[bool, Mapping[str, tuple[object, ...]]] = {
    True: {"truncate": (None, True)},
    False: {"mscale": (None, 1), "mscale_all_dim": (None, 0)},
}
"""Keys that must have their defaults, with and without latent attention, since they affect only the other kind."""


def model_config_from_hf(config: HFConfig) -> ModelConfig:
    """Return the architecture that a config.json describes.

    Raises ConfigError for an unknown family, unsupported features and missing keys; paths are keys of config.json.
    """
    config = language_part(config)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        what = f"{quoted(model_type)} is not supported"
        raise refused("not-supported", "model_type", what, f"known: {', '.join(FAMILIES)}")
    values = {**_DEFAULTS, **family.defaults, **config}
    for alias, key in family.aliases.items():
        if values.get(alias) is not None:
            values[key] = values[alias]
    keys = _SIZES | _OPTIONS | family.sizes
    given = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
    if problems := [*_mistyped(ModelConfig, given, keys), *_mistyped(_Keys, values, keys)]:
        raise ConfigError(problems)  # the other keys are not read then
    values.update(family.complete(values))
    if problems := [*_problems_of(family, values)]:
        raise ConfigError(problems)
    fields = {name: values[key] for name, key in keys.items()}
    if not family.hybrid:
        rotary, known = _rotary_of(values), RopeScalingConfig.model_fields
        fields["rotary_base"] = rotary["rope_theta"]
        given = {key: value for key, value in rotary.items() if key in known and value is not None}
        fields["rope_scaling"] = None if rotary["rope_type"] == "default" else given
    fields |= {**family.fields, **family.read(values)}
    if problems := [*_mistyped(ModelConfig, fields, keys)]:
        raise ConfigError(problems)
    model = ModelConfig.model_validate(fields)
    if problems := [Problem(problem.code, "", str(problem)) for problem in collect_problems(model)]:
        raise ConfigError(problems)  # incompatible sizes; the problems name them
    return model


def _mistyped(model: type[BaseModel], given: HFConfig, keys: Mapping[str, str]) -> Iterator[Problem]:
    try:
        model.model_validate(given)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path = ".".join(str(part) for part in details["loc"])
            if details["type"] != "missing":  # reported for the config.json keys
                what = f"{quoted(details['input'])}: {details['msg']}"
                yield Problem("not-allowed", keys.get(path, path), what)


def _problems_of(family: Family, values: HFConfig) -> Iterator[Problem]:
    of_model = f"of a {family.model_type} model"
    for refusal in (*_REFUSALS, *family.refusals):
        if (value := values.get(refusal.key)) not in refusal.allowed:
            what = f"{quoted(value)} {of_model}: {refusal.reason}"
            yield Problem("not-supported", refusal.key, what)
    mixed = family.hybrid or not {"sliding_window", "linear_attention_freq"}.isdisjoint(family.varied)
    kinds = () if mixed else values.get("layer_types") or ()
    if foreign := sorted({*cast("list[str]", kinds)} - {"full_attention"}):
        what = f"{quoted(foreign)} {of_model}: only full_attention is supported"
        yield Problem("not-supported", "layer_types", what)
    if not family.hybrid:
        yield from _rotary_problems(values, of_model, latent="kv_lora_rank" in family.sizes)
        of_experts = "num_moe_experts" in family.sizes
        if of_experts and values.get("num_experts_per_tok") == 1 and values.get("norm_topk_prob", True):
            # ModelConfig refuses it too, with a message for random weights; here the weights fix the architecture.
            what = f"1 {of_model} gives every expert the share 1, so that the router has no gradient"
            remedy = (
                "use a model with more experts per token, or norm_topk_prob: false where the model allows it"
            )
            yield Problem("no-signal", "num_experts_per_tok", what, remedy)
    yield from family.problems(values)
    for key in (_SIZES | family.sizes).values():
        if values.get(key) is None:
            yield Problem("missing", key, f"missing, and a {family.model_type} model has it")


def _rotary_of(values: HFConfig) -> dict[str, object]:
    """Return the rotary positions' base, type and factors.

    Follows transformers 5 (`modeling_rope_utils.py`): `rope_scaling`, which model cards recommend adding, replaces
    `rope_parameters`, and an original context outside the section takes precedence over one inside.
    """
    given = dict(cast("HFConfig", values.get("rope_scaling") or values.get("rope_parameters") or {}))
    kind = given.get("rope_type") or given.get("type") or "default"
    beside = values.get(_ORIGINAL) if kind != "default" else None
    original = {} if beside is None else {_ORIGINAL: beside}
    return {"rope_theta": values["rope_theta"], **given, "rope_type": kind, **original}


def _rotary_problems(values: HFConfig, of_model: str, *, latent: bool) -> Iterator[Problem]:
    rotary = _rotary_of(values)
    base = cast("HFConfig", values.get("rope_parameters") or {}).get("rope_theta")
    if base is not None and base != rotary["rope_theta"]:
        ours = quoted(rotary["rope_theta"])
        what = f"{ours} takes precedence over rope_parameters.rope_theta: {quoted(base)}"
        yield Problem("contradicts", "rope_scaling.rope_theta", what, "write the base that is meant in both")
    kind = rotary["rope_type"]
    known = [one for one in _ROPE_NEEDS if not (latent and one == "llama3")]
    if kind not in known:
        what = f"{quoted(kind)} {of_model} is not supported"
        yield Problem("not-supported", "rope_type", what, f"known: {', '.join(known)}")
    elif foreign := sorted(rotary.keys() - (_YARN_KEYS if kind == "yarn" else _ROPE_KEYS)):
        yield Problem("not-supported", "rope_parameters", f"{quoted(foreign)} {of_model} are not supported")
    if rotary.get("partial_rotary_factor") not in (1, None):
        what = "rotary positions on a part of each head are not supported"
        yield Problem("not-supported", "partial_rotary_factor", what)
    for key, turns in ROPE_TURNS.get(str(kind), {}).items():
        if rotary.get(key) not in (None, turns):
            what = f"{quoted(rotary[key])} {of_model}: other turns than {turns:g} are not supported"
            yield Problem("not-supported", f"rope_scaling.{key}", what)
    for key in _ROPE_NEEDS.get(str(kind), ()):
        if key not in rotary:
            yield Problem("missing", f"rope_scaling.{key}", f"is missing, but rope_type {kind} needs it")
    if kind == "yarn":
        yield from _yarn_problems(rotary, of_model, latent=latent)


def _yarn_problems(rotary: HFConfig, of_model: str, *, latent: bool) -> Iterator[Problem]:
    for key, allowed in _YARN_DEFAULTS[latent].items():
        if rotary.get(key) not in allowed:
            what = f"{quoted(rotary[key])} {of_model}: engines and training would interpret it differently"
            yield Problem("not-supported", f"rope_scaling.{key}", what, "known: the default")
    whole = rotary.get("mscale_all_dim")
    if latent and whole and rotary.get("mscale") is None:
        what = (
            f"is missing beside mscale_all_dim: {quoted(whole)}; transformers and engines read it differently"
        )
        yield Problem("missing", "rope_scaling.mscale", what, "set both, or neither")


def hf_config_of(
    model: ModelConfig, *, dtype: str = "float32", origin: HFConfig | None = None
) -> dict[str, object]:
    """Return the config.json for an architecture; raises ValueError if no family has it.

    origin: the config.json from which the architecture was read, if any; its family, special tokens and training keys
    are kept.
    """
    origin = origin or {}
    family = FAMILIES.get(str(origin.get("model_type"))) or family_of(model)
    scaling, positions = model.rope_scaling, dict[str, object]()
    if not family.hybrid:
        rotary: dict[str, object] = {"rope_theta": model.rotary_base, "rope_type": "default"}
        if scaling is not None:
            rotary |= {"rope_type": scaling.rope_type, **scaling.written}
        # Repeat base and scaling for transformers 4, which would otherwise use its defaults silently.
        again = rotary if scaling else None
        positions = {"rope_parameters": rotary, "rope_theta": model.rotary_base, "rope_scaling": again}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        **{key: getattr(model, name) for name, key in (_SIZES | _OPTIONS | family.sizes).items()},
        "intermediate_size": model.shape.ffn_size,
        "num_key_value_heads": model.shape.query_groups,
        "head_dim": model.shape.head_dim,
        **({"hidden_act": "silu"} if model.shape.gated else {}),
        "attention_dropout": 0.0,
        "initializer_range": origin.get("initializer_range", model.init_method_std),
        **positions,
        **{key: origin.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{refusal.key: refusal.allowed[0] for refusal in family.refusals},
        **family.write(model, origin),
    }
