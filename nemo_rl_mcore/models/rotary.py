"""Rotary positions in a config.json: read, written and judged."""

from collections.abc import Iterator, Mapping
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig, RopeScalingConfig
from nemo_rl_mcore.errors import quoted
from nemo_rl_mcore.models.family import Family, HFConfig

_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_YARN = ("factor", _ORIGINAL)
_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3}
_YARN_KEYS = {*_KEYS, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
_NEEDED: Mapping[str, tuple[str, ...]] = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_UNLIKE_LATENTS: Mapping[str, tuple[object, ...]] = {"truncate": (None, True)}
"""Keys that change a model without latent attention alone."""
_OF_LATENTS: Mapping[str, tuple[object, ...]] = {"mscale": (None, 1), "mscale_all_dim": (None, 0)}
"""Keys that change a model of latent attention, where they have other values."""


def rotary_of(values: HFConfig) -> dict[str, object]:
    """Return base, type and factors of the rotary positions.

    transformers 5 writes `rope_parameters`; where a file has `rope_scaling` too, as model cards say to add, that one
    counts alone (`convert_rope_params_to_dict` in its modeling_rope_utils.py). The original context counts where it
    stands beside the section, if it does (`standardize_rope_params`).
    """
    given = dict(cast("HFConfig", values.get("rope_scaling") or values.get("rope_parameters") or {}))
    kind = given.get("rope_type") or given.get("type") or "default"
    beside = values.get(_ORIGINAL) if kind != "default" else None
    original = {} if beside is None else {_ORIGINAL: beside}
    return {"rope_theta": values["rope_theta"], **given, "rope_type": kind, **original}


def rotary_fields(rotary: HFConfig) -> dict[str, object]:
    """Return the fields of ModelConfig for them."""
    fields: dict[str, object] = {"rotary_base": rotary["rope_theta"]}
    if rotary["rope_type"] != "default":
        known = RopeScalingConfig.model_fields
        fields["rope_scaling"] = {
            key: value for key, value in rotary.items() if key in known and value is not None
        }
    return fields


def rotary_keys(model: ModelConfig) -> dict[str, object]:
    """Return the keys of a config.json for those of an architecture."""
    rotary: dict[str, object] = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if (scaling := model.rope_scaling) is not None:
        rotary |= {"rope_type": scaling.rope_type, **{key: getattr(scaling, key) for key in scaling.keys}}
    return {
        "rope_parameters": rotary,
        # The same where transformers 4 looks for it: it would silently take the default.
        "rope_theta": model.rotary_base,
        "rope_scaling": rotary if model.rope_scaling else None,
    }


def rotary_problems(family: Family, values: HFConfig) -> Iterator[Problem]:
    """Yield kinds and keys of rotary positions that are missing or not supported."""
    rotary = rotary_of(values)
    yield from _hidden_base(values, rotary)
    kind = rotary["rope_type"]
    known = [one for one in _NEEDED if not (family.latent_attention and one == "llama3")]
    if kind not in known:
        yield Problem(
            "not-supported",
            "rope_type",
            f"{quoted(kind)} of a {family.model_type} model is not supported",
            f"known: {', '.join(known)}",
        )
    elif foreign := sorted(rotary.keys() - (_YARN_KEYS if kind == "yarn" else _KEYS)):
        yield Problem(
            "not-supported",
            "rope_parameters",
            f"{quoted(foreign)} of a {family.model_type} model are not supported",
        )
    if rotary.get("partial_rotary_factor") not in (1, None):
        yield Problem(
            "not-supported",
            "partial_rotary_factor",
            "rotary positions on a part of each head are not supported",
        )
    for key in _NEEDED.get(str(kind), ()):
        if key not in rotary:
            yield Problem("missing", f"rope_scaling.{key}", f"missing, and rope_type {kind} needs it")
    others = _UNLIKE_LATENTS if family.latent_attention else _OF_LATENTS
    for key, allowed in others.items():
        if kind == "yarn" and rotary.get(key) not in allowed:
            what = f"{quoted(rotary[key])} of a {family.model_type} model: engines and training would read it otherwise"
            yield Problem("not-supported", f"rope_scaling.{key}", what, "known: the default")
    whole = rotary.get("mscale_all_dim")
    if family.latent_attention and kind == "yarn" and whole and rotary.get("mscale") is None:
        what = (
            f"missing with mscale_all_dim: {quoted(whole)}, which transformers and engines read differently"
        )
        yield Problem("missing", "rope_scaling.mscale", what, "set both, or neither")


def _hidden_base(values: HFConfig, rotary: HFConfig) -> Iterator[Problem]:
    base = cast("HFConfig", values.get("rope_parameters") or {}).get("rope_theta")
    if base is not None and base != rotary["rope_theta"]:
        yield Problem(
            "contradicts",
            "rope_scaling.rope_theta",
            f"{quoted(rotary['rope_theta'])} counts, and rope_parameters.rope_theta: {quoted(base)} does not",
            "write the base that is meant in both",
        )
