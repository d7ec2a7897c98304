"""Where a Hugging Face model or tokenizer lies on this machine, and its JSON files; without huggingface_hub."""

import os
import re
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.data.strict_json import read_json

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Return whether a name may be that of a model on the hub: `organisation/model`."""
    return _HUB_ID.fullmatch(name) is not None


def local_folder(name: str) -> Path | None:
    """Return the folder of that path or, for a hub id, the newest snapshot in the local cache; None without one."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        return None
    cached = _cache() / f"models--{name.replace('/', '--')}"
    newest = cached / "refs" / "main"
    if not newest.is_file():
        return None
    snapshot = cached / "snapshots" / newest.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def _cache() -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variable in os.environ:
            return Path(os.environ[variable]).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{caches}/huggingface")
    return Path(home).expanduser() / "hub"


def read_object(path: Path, key: str) -> dict[str, object]:
    """Return the object that a JSON file of transformers holds; raises ConfigError with a problem of the key."""
    try:
        config = read_json(path, finite=False)  # transformers writes Infinity
    except OSError as error:
        what = f"{str(path)!r} cannot be read: {error.strerror}"
        raise ConfigError([Problem("not-readable", key, what)]) from error
    except ValueError as error:
        raise ConfigError([Problem("not-readable", key, f"{str(path)!r} is not JSON: {error}")]) from error
    if not isinstance(config, dict):
        raise ConfigError([Problem("not-readable", key, f"{str(path)!r} does not hold an object")])
    return cast("dict[str, object]", config)
