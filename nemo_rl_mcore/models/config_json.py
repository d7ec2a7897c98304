"""Between the `config.json` of a Hugging Face model and `ModelConfig`; plain data, neither torch nor transformers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.config.base import ConfigError, PositiveFloat, Problem, Size, collect_problems
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models import FAMILIES, family_of
from nemo_rl_mcore.models.family import Family, HFConfig, Refusal
from nemo_rl_mcore.models.rotary import rotary_fields, rotary_keys, rotary_of, rotary_problems

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
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_Words = Annotated[list[str], Field(fail_fast=True)]
_Number = Annotated[int, Field(ge=0, le=2_000)]


class _Keys(BaseModel):
    """Keys of config.json that are read, and are no field of ModelConfig under another name; null is left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    layer_types: _Words | None = None
    layers_block_type: _Words | None = None
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


def model_config_from_hf(config: HFConfig) -> ModelConfig:
    """Return the architecture that a config.json describes.

    Raises ConfigError with every unknown family, unsupported feature or missing key; paths are keys of config.json.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            [
                Problem(
                    "not-supported", "model_type", f"{quoted(model_type)} is not supported", f"known: {known}"
                )
            ]
        )
    values = {**_DEFAULTS, **family.defaults, **config}
    for alias, key in family.aliases.items():
        if values.get(alias) is not None:
            values[key] = values[alias]
    if problems := [*_mistyped(family, values)]:
        raise ConfigError(problems)
    values.update(family.complete(values))
    problems = [
        *_refused(family, values),
        *(rotary_problems(family, values) if family.rotary else ()),
        *family.problems(values),
        *_missing(family, values),
    ]
    if problems:
        raise ConfigError(problems)
    return _model_config(family, values)


def _mistyped(family: Family, values: HFConfig) -> Iterator[Problem]:
    """Yield keys of another type than they have, or too large to be counted by; nothing is made of the others then."""
    keys = _SIZES | _OPTIONS | family.sizes
    fields = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
    for model, given in ((ModelConfig, fields), (_Keys, values)):
        try:
            model.model_validate(given)
        except ValidationError as error:
            yield from _translated(error, keys)


def _refused(family: Family, values: HFConfig) -> Iterator[Problem]:
    for refusal in (*_REFUSALS, *family.refusals):
        given = values.get(refusal.key)
        if given not in refusal.allowed:
            what = f"{quoted(given)} of a {family.model_type} model: {refusal.reason}"
            yield Problem("not-supported", refusal.key, what)
    kinds = () if family.hybrid or family.windows else values.get("layer_types") or ()
    foreign = sorted({*cast("list[str]", kinds)} - {"full_attention"})
    if foreign:
        yield Problem(
            "not-supported",
            "layer_types",
            f"{quoted(foreign)} of a {family.model_type} model: only full_attention is supported",
        )


def _missing(family: Family, values: HFConfig) -> Iterator[Problem]:
    for key in (_SIZES | family.sizes).values():
        if values.get(key) is None:
            yield Problem("missing", key, f"missing, and a {family.model_type} model has it")


def _model_config(family: Family, values: HFConfig) -> ModelConfig:
    keys = _SIZES | _OPTIONS | family.sizes
    fields = {
        **{name: values[key] for name, key in keys.items()},
        **(rotary_fields(rotary_of(values)) if family.rotary else {}),
        **family.fields,
        **family.read(values),
    }
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
        if details["type"] != "missing":  # see `_missing`
            what = f"{quoted(details['input'])}: {details['msg']}"
            yield Problem("not-allowed", keys.get(path, path), what)


def hf_config_of(
    model: ModelConfig, *, dtype: str = "float32", origin: HFConfig | None = None
) -> dict[str, object]:
    """Return the config.json of an architecture; ValueError where no family has it.

    origin: the config.json that the architecture came from, if any; its family, its special tokens and what it says of
    training stay.
    """
    origin = origin or {}
    family = FAMILIES.get(str(origin.get("model_type"))) or family_of(model)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        **{key: getattr(model, name) for name, key in (_SIZES | _OPTIONS | family.sizes).items()},
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        **({"hidden_act": "silu"} if model.gated else {}),
        "attention_dropout": 0.0,
        "initializer_range": origin.get("initializer_range", model.init_method_std),
        **(rotary_keys(model) if family.rotary else {}),
        **{key: origin.get(key) for key in _TOKENS},
        **{refusal.key: refusal.allowed[0] for refusal in family.refusals},
        **family.write(model, origin),
    }
