"""Values implied by `policy.model_name`: the architecture and the default tokenizer."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from nemo_rl_mcore.config.base import ConfigError, Problem, Tree, as_yaml, refused
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.data.hub import is_hub_id, local_folder, read_object
from nemo_rl_mcore.models.config_json import model_config_from_hf
from nemo_rl_mcore.models.family import HFConfig
from nemo_rl_mcore.models.qwen3_5 import language_part

MODEL, TOKENIZER = "policy.model_name", "policy.tokenizer.name"


def other_tokenizer(model: str | None, tokenizer: str) -> Problem | None:
    """Return a problem if the tokenizer differs from the model's own, else None."""
    if model is None or model == tokenizer:
        return None
    theirs, ours = local_folder(model), local_folder(tokenizer)
    if theirs is not None:  # every model on the hub has a tokenizer
        if not any((theirs / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            return None
        if ours is not None and _contents(theirs) == _contents(ours):
            return None
    what = f"{tokenizer!r} is not the tokenizer of {MODEL}: {model!r}"
    remedy = f"set it to {model!r}, or set both in one file if this one is meant"
    return Problem("contradicts", TOKENIZER, what, remedy, (MODEL,))


def _contents(folder: Path) -> tuple[object, ...]:
    """Return the settings that determine tokenization; they are unchanged in a copy that was saved again."""
    read = list[HFConfig]()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            read.append(read_object(folder / name, TOKENIZER))
        except ConfigError:  # reported when the tokenizer is checked
            read.append({})
    tokens, settings = read
    template = folder / "chat_template.jinja"
    written = template.read_bytes() if template.is_file() else str(settings.get("chat_template")).encode()
    keys = ("model", "added_tokens", "normalizer", "pre_tokenizer")
    return *(tokens.get(key) for key in keys), written.strip()


OVERRIDES = "hf_config_overrides"
_ROTATIONS = ("rope_scaling", "rope_theta")
_ALLOWED = ("max_position_embeddings", *_ROTATIONS)
_SAID_OF_ROTATIONS = ("rope_type", "rope_parameters", "rotary_base", *_ROTATIONS)
"""Keys that problems of rotary positions name."""


def overridden(config: HFConfig, overrides: HFConfig) -> HFConfig:
    """Return a config.json with a recipe's overrides, applied as by transformers' from_pretrained.

    rope_scaling replaces the whole section, except a base that it does not set; null means no scaling.
    """
    given = {key: value for key, value in overrides.items() if key in _ALLOWED}
    if not isinstance(given.get("rope_scaling"), Mapping | None):
        del given["rope_scaling"]  # reported by `override_problems`
    changed = {**config, **given}
    if "rope_scaling" in given:
        section = changed.pop("rope_parameters", None)
        changed.pop("original_max_position_embeddings", None)  # part of the section, stored outside it
        rope = dict(cast("HFConfig", section)) if isinstance(section, Mapping) else {}
        base = given.get("rope_theta") or rope.get("rope_theta") or config.get("rope_theta")
        own = cast("HFConfig", given["rope_scaling"] or {"rope_type": "default"})
        changed["rope_scaling"] = {**({} if base is None else {"rope_theta": base}), **own}
    elif "rope_theta" in given:
        for key in ("rope_parameters", "rope_scaling"):
            section = config.get(key)
            if isinstance(section, Mapping) and "rope_theta" in section:
                changed[key] = {**cast("HFConfig", section), "rope_theta": given["rope_theta"]}
    return changed


def override_problems(overrides: HFConfig | None, *, named: bool) -> Iterator[Problem]:
    """Yield problems for forbidden keys, and for overrides without model_name (named: true if it is set)."""
    for key in overrides or {}:
        if key not in _ALLOWED:
            what = "is fixed by the weights or by other sections, and cannot be overridden"
            yield Problem("not-supported", f"{OVERRIDES}.{key}", what, f"known: {', '.join(_ALLOWED)}")
    if overrides and not named:
        what = "overrides the config.json of model_name, which is not set"
        yield Problem("requires", OVERRIDES, what, "say it in model", ("model_name",))
    scaling = (overrides or {}).get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        what = f"{scaling!r} is not a section"
        yield Problem("not-allowed", f"{OVERRIDES}.rope_scaling", what, "give one, or null")


MODEL_NAME = "model_name"
_OF_EXPERTS = ("aux_loss_coeff", "router_load_balancing_type", "router_dtype", "router_bias_update_rate")
OF_TRAINING = {"init_method_std", "mtp_loss_scaling_factor", *(f"moe_{name}" for name in _OF_EXPERTS)}
"""Fields of policy.model that do not follow from the weights."""


def fill_from_model_name(
    policy: Mapping[str, object], *, tokenizer: bool = True
) -> tuple[Tree, list[Problem]]:
    """Fill a policy section from its `model_name`; problems have paths relative to the section.

    tokenizer: true if the section has a tokenizer, by default the model's.
    """
    section = dict(policy)
    name, overrides, given = section.get(MODEL_NAME), section.get(OVERRIDES), section.get("model")
    if not isinstance(name, str):
        return section, []
    named = section.get("tokenizer", {})
    if tokenizer and isinstance(named, Mapping):
        section["tokenizer"] = {"name": name, **cast("Tree", named)}
    try:
        derived = pretrained_model(name, cast("Tree", overrides if isinstance(overrides, Mapping) else {}))
    except ConfigError as error:
        return section, [*error.problems]
    if derived is None:
        what = f"{name!r} is not a local folder, and its config.json is neither in the local cache nor known here"
        remedy = "download the model, or describe the architecture in policy.model"
        return section, [] if given is not None else [Problem("not-found", MODEL_NAME, what, remedy)]
    if isinstance(given, ModelConfig):
        return section, differences(given, derived, name)
    if given is not None and not isinstance(given, Mapping):
        return section, []
    merged = section["model"] = derived.model_dump() | dict(cast("Tree", given or {}))
    try:
        model = ModelConfig.model_validate(merged)
    except ValidationError:
        return section, []  # the section's own validation reports the wrong field
    contradictions = differences(model, derived, name)
    if contradictions:  # a mixture of both would raise spurious problems
        section["model"] = derived
    return section, contradictions


def pretrained_model(name: str, overrides: HFConfig | None = None) -> ModelConfig | None:
    """Return the architecture for a local folder or a hub id; None for a hub id that is neither cached nor known.

    overrides: a recipe's replacements for keys of config.json.
    Raises ConfigError with every problem of `model_name` or the overrides.
    """
    config = read_hf_config(name)
    if config is None:
        return None
    try:
        return model_config_from_hf(overridden(config, overrides) if overrides else config)
    except ConfigError as error:
        written = {*(overrides or ())}
        if not written.isdisjoint(_ROTATIONS):
            written |= {*_SAID_OF_ROTATIONS}
        raise ConfigError(
            Problem(problem.code, f"{OVERRIDES}.{problem.path}", problem.what, problem.remedy)
            if problem.path.partition(".")[0] in written
            else Problem(problem.code, MODEL_NAME, f"{name!r}: {problem}")
            for problem in error.problems
        ) from error


@cache
def known_models() -> Mapping[str, HFConfig]:
    """Return the config.json of known hub models by id, for checking recipes before a download."""
    return json.loads(Path(__file__).with_name("known_models.json").read_text("utf-8"))


def read_hf_config(name: str) -> HFConfig | None:
    """Return the config.json for a local folder or a hub id; None for a hub id that is neither cached nor known."""
    folder, known = local_folder(name), known_models().get(name)
    if folder is not None and (folder / "config.json").is_file():
        return language_part(read_object(folder / "config.json", MODEL_NAME))
    if known is not None or (folder is None and is_hub_id(name)):  # a cache may hold other files of the model
        return language_part(known) if known else None
    code, what, remedy = "not-found", f"no folder {name!r}", "name a Hugging Face folder or a hub id"
    if folder is not None:
        code, what, remedy = "not-readable", f"the folder {str(folder)!r} holds no config.json", ""
    raise refused(code, MODEL_NAME, what, remedy)


def differences(given: ModelConfig, derived: ModelConfig, name: str) -> list[Problem]:
    ours, theirs, found = explicit_fields(given), explicit_fields(derived), list[Problem]()
    remedy = (
        "remove it, or write model: null if a parent recipe sets it; the weights determine the architecture"
    )
    for key in theirs:
        if key not in OF_TRAINING and ours[key] != theirs[key]:
            what = (
                f"{as_yaml(ours[key])} contradicts {MODEL_NAME}: {name!r}, which has {as_yaml(theirs[key])}"
            )
            found.append(Problem("contradicts", f"model.{key}", what, remedy, (MODEL_NAME,)))
    return found


def explicit_fields(model: ModelConfig) -> Tree:
    """Return all fields, including sizes that are implied by other fields."""
    return {
        **model.model_dump(),
        "num_query_groups": model.shape.query_groups,
        "kv_channels": model.shape.head_dim,
        "ffn_hidden_size": model.shape.ffn_size,
        "moe_ffn_hidden_size": model.shape.expert_ffn_size,
    }
