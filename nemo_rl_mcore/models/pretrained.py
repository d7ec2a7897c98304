"""What `policy.model_name` settles: the architecture, and the tokenizer where none is named."""

from collections.abc import Mapping
from typing import cast

from pydantic import ValidationError

from nemo_rl_mcore.config.base import Code, ConfigError, Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.data.hub_cache import is_hub_id, local_folder, read_object
from nemo_rl_mcore.models.config_json import model_config_from_hf
from nemo_rl_mcore.models.family import HFConfig
from nemo_rl_mcore.models.known_models import KNOWN_MODELS
from nemo_rl_mcore.models.overrides import OVERRIDES, is_of_overrides, overridden

Section = dict[str, object]

MODEL_NAME = "model_name"
OF_TRAINING = frozenset(
    (
        *("init_method_std", "moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_dtype"),
        *("moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
    )
)
"""Fields of policy.model that the weights say nothing about."""


def fill_from_model_name(
    policy: Mapping[str, object], *, tokenizer: bool = True
) -> tuple[Section, list[Problem]]:
    """Complete a policy section by what its `model_name` says; paths of problems are relative to the section.

    tokenizer: whether the section has one, which then is the model's where it names none.
    """
    section = dict(policy)
    name = section.get(MODEL_NAME)
    if not isinstance(name, str):
        return section, []
    named = section.get("tokenizer", {})
    if tokenizer and isinstance(named, Mapping):
        section["tokenizer"] = {"name": name, **cast("Section", named)}
    given = section.get("model")
    overrides = section.get(OVERRIDES)
    try:
        derived = pretrained_model(
            name, cast("Section", overrides) if isinstance(overrides, Mapping) else None
        )
    except ConfigError as error:
        return section, [*error.problems]
    if derived is None:
        return section, [] if given is not None else [_unknown(name)]
    if isinstance(given, ModelConfig):
        return section, differences(given, derived, name)
    if given is not None and not isinstance(given, Mapping):
        return section, []
    merged = derived.model_dump() | dict(cast("Section", given or {}))
    section["model"] = merged
    try:
        model = ModelConfig.model_validate(merged)
    except ValidationError:
        return section, []  # the section's own validation says which field is wrong
    contradictions = differences(model, derived, name)
    if contradictions:  # a mixture of the two would raise further problems that are none
        section["model"] = derived
    return section, contradictions


def pretrained_model(name: str, overrides: HFConfig | None = None) -> ModelConfig | None:
    """Return the architecture of a local folder or a hub id; None for a hub id that is neither cached nor known.

    overrides: what a recipe writes over in config.json.
    Raises ConfigError with a problem of `model_name`, or of the overrides, for each thing that keeps it from use.
    """
    config = read_hf_config(name)
    if config is None:
        return None
    try:
        return model_config_from_hf(overridden(config, overrides) if overrides else config)
    except ConfigError as error:
        raise ConfigError(
            Problem(problem.code, f"{OVERRIDES}.{problem.path}", problem.what, problem.remedy)
            if overrides and is_of_overrides(problem.path, overrides)
            else _problem(problem.code, f"{name!r}: {problem}")
            for problem in error.problems
        ) from error


def read_hf_config(name: str) -> HFConfig | None:
    """Return the config.json of a local folder or a hub id; None for a hub id that is neither cached nor known."""
    folder = local_folder(name)
    if folder is None:
        if not is_hub_id(name):
            raise ConfigError(
                [_problem("not-found", f"no folder {name!r}", "name a Hugging Face folder or a hub id")]
            )
        return KNOWN_MODELS.get(name)
    path = folder / "config.json"
    if not path.is_file():
        if name in KNOWN_MODELS:  # a cache may hold other files of the model
            return KNOWN_MODELS[name]
        raise ConfigError([_problem("not-readable", f"the folder {str(folder)!r} holds no config.json")])
    return read_object(path, MODEL_NAME)


def differences(given: ModelConfig, derived: ModelConfig, name: str) -> list[Problem]:
    """Return a problem for each field in which policy.model differs from the architecture of the weights."""
    ours, theirs = explicit_fields(given), explicit_fields(derived)
    return [
        Problem(
            "contradicts",
            f"model.{key}",
            f"{ours[key]} contradicts the {theirs[key]} of policy.{MODEL_NAME}: {name!r}",
            "remove it, or set model: null over a parent's section; the architecture is that of the weights",
            (MODEL_NAME,),
        )
        for key in theirs
        if key not in OF_TRAINING and ours[key] != theirs[key]
    ]


def explicit_fields(model: ModelConfig) -> Section:
    """Return the fields, with the sizes that others imply."""
    return {
        **model.model_dump(),
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "moe_ffn_hidden_size": model.expert_ffn_size,
    }


def _unknown(name: str) -> Problem:
    return _problem(
        "not-found",
        f"{name!r} is no local folder, and its config.json is neither in the local Hugging Face cache nor known here",
        "download the model, or describe the architecture in policy.model",
    )


def _problem(code: Code, what: str, remedy: str = "") -> Problem:
    return Problem(code, MODEL_NAME, what, remedy)
