"""What a recipe may write over in a model's config.json: its positions, which no weight rests on."""

from collections.abc import Iterator, Mapping
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.models.family import HFConfig

OVERRIDES = "hf_config_overrides"
_ROTATIONS = ("rope_scaling", "rope_theta")
_ALLOWED = ("max_position_embeddings", *_ROTATIONS)
_SAID_OF_ROTATIONS = ("rope_type", "rope_parameters", "rotary_base", *_ROTATIONS)
"""Keys that what is wrong with rotations names."""


def overridden(config: HFConfig, overrides: HFConfig) -> HFConfig:
    """Return a config.json with the keys of a recipe in place of its own, as transformers' from_pretrained has it.

    rope_scaling takes the place of the whole section, but for the base where it names none; null is no scaling.
    """
    given = {key: value for key, value in overrides.items() if key in _ALLOWED}
    if not isinstance(given.get("rope_scaling"), Mapping | None):
        del given["rope_scaling"]  # which is told by `override_problems`
    changed = {**config, **given}
    if "rope_scaling" in given:
        section = changed.pop("rope_parameters", None)
        changed.pop("original_max_position_embeddings", None)  # of the section, though it stands beside it
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


def is_of_overrides(path: str, overrides: HFConfig) -> bool:
    """Return whether a key of config.json is one that a recipe has written over."""
    key = path.partition(".")[0]
    return key in overrides or (key in _SAID_OF_ROTATIONS and any(one in overrides for one in _ROTATIONS))


def override_problems(overrides: HFConfig | None, *, named: bool) -> Iterator[Problem]:
    """Yield keys that may not be written over, and overrides of no config.json; named: whether there is model_name."""
    for key in overrides or {}:
        if key not in _ALLOWED:
            what = "is of the weights, or of what trains them, and no key to write over"
            yield Problem("not-supported", f"{OVERRIDES}.{key}", what, f"known: {', '.join(_ALLOWED)}")
    if overrides and not named:
        what = "writes over config.json of model_name, which is not given"
        yield Problem("requires", OVERRIDES, what, "say it in model", ("model_name",))
    scaling = (overrides or {}).get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        yield Problem(
            "not-allowed", f"{OVERRIDES}.rope_scaling", f"{scaling!r} is no section", "give one, or null"
        )
