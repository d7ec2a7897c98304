"""Where a Hugging Face model or tokenizer lies on this machine; path arithmetic, without huggingface_hub."""

import os
import re
from pathlib import Path

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
