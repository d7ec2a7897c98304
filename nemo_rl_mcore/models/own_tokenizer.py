"""A model that is given together with the tokenizer of another one; plain data, as far as files tell."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.data.hub_cache import local_folder
from nemo_rl_mcore.data.strict_json import read_json

MODEL, TOKENIZER = "policy.model_name", "policy.tokenizer.name"
_TEMPLATE = "chat_template.jinja"


def other_tokenizer(model: str | None, tokenizer: str) -> Problem | None:
    """Return what is wrong with a tokenizer which is not that of the model, where the model has one."""
    if model is None or model == tokenizer or not _has_another(model, tokenizer):
        return None
    return Problem(
        "contradicts",
        TOKENIZER,
        f"{tokenizer!r} is not the tokenizer of {MODEL}: {model!r}",
        f"set it to {model!r}, or set both in one file if this one is meant",
        (MODEL,),
    )


def inherited(set_in: Mapping[str, int]) -> bool:
    """Return whether the tokenizer comes from a file below which another file sets the model.

    set_in: for each key the place of the file that sets it; a file comes after those that it names in `defaults:`.
    """
    return set_in.get(MODEL, -1) > set_in.get(TOKENIZER, len(set_in))


def _has_another(model: str, tokenizer: str) -> bool:
    theirs, ours = local_folder(model), local_folder(tokenizer)
    if theirs is None:  # every model of the hub has one
        return True
    if not (theirs / "tokenizer.json").exists() and not (theirs / "tokenizer_config.json").exists():
        return False
    return ours is None or _contents(theirs) != _contents(ours)


def _contents(folder: Path) -> tuple[object, ...]:
    """Return what decides how text becomes tokens: a copy that was saved again has the same."""
    tokens, settings = (_object(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    template = folder / _TEMPLATE
    written = template.read_bytes() if template.is_file() else str(settings.get("chat_template")).encode()
    keys = ("model", "added_tokens", "normalizer", "pre_tokenizer")
    return *(tokens.get(key) for key in keys), written.strip()


def _object(path: Path) -> dict[str, object]:
    try:
        found = read_json(path, finite=False)
    except (OSError, ValueError):  # reported where the tokenizer is examined
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}
