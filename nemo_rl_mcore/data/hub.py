"""Hugging Face's folders of models and tokenizers: find, fetch and examine them, without torch or transformers.

`huggingface_hub`, `tokenizers` and `safetensors` are imported on use, in 15 ms each.
"""

# huggingface_hub leaves parameters of its functions untyped.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from nemo_rl_mcore.config.base import Problem, refused
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.errors import RefusedError, quoted, shortened

if TYPE_CHECKING:
    from nemo_rl_mcore.config.policy import PolicyConfig

CHAR_TOKENIZER_NAME = "char"
# A character's position is its id. Letters carry no meaning: a fresh model babbles them.
CHAR_VOCABULARY = "0123456789+=>#^$_abcdefghijklmno"
CHAR_EOS = "$"
GENERATION = "generation_config.json"
EOS = "eos_token_id"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KEY = "policy.tokenizer.name"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OF_TOKENIZERS = (
    *("tokenizer*", "*.jinja", "special_tokens_map.json"),
    *("vocab*", "merges.txt", "added_tokens.json"),
)
_OF_MODELS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_UNWANTED = ("consolidated*", "original/*")
"""Copies of the weights in other formats."""


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def local_folder(name: str) -> Path | None:
    """Return the folder at this path or, for a hub id, its newest snapshot in the local cache; None without one."""
    if (folder := Path(name)).is_dir():
        return folder
    if not is_hub_id(name):
        return None
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    cache = str(Path(os.environ.get("HF_HOME", f"{caches}/huggingface")) / "hub")
    cache = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", cache))
    cached = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
    newest = cached / "refs" / "main"
    if not newest.is_file():
        return None
    snapshot = cached / "snapshots" / newest.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def tokenizer_folder(name: str | None) -> Path | None:
    return None if name in (None, CHAR_TOKENIZER_NAME) else local_folder(name)


def read_object(path: Path, key: str) -> dict[str, object]:
    """Return the object in a JSON file of transformers; raises ConfigError at `key`."""
    try:
        config = read_json(path, finite=False)  # transformers writes Infinity
        if not isinstance(config, dict):
            raise ValueError("it does not hold an object")
        return cast("dict[str, object]", config)
    except (OSError, ValueError) as error:
        raise refused("not-readable", key, f"{str(path)!r} cannot be read: {error}") from error


def end_ids(model_name: str | None, tokenizer: str) -> tuple[int, ...]:
    """Return the ids of `eos_token_id` in generation_config.json and config.json of these folders or hub ids.

    Files that are not on this machine yet are skipped. Raises ConfigError for an unreadable file, or a wrong value.
    """
    found = list[int]()
    for key, name in (("policy.model_name", model_name), (KEY, tokenizer)):
        folder = tokenizer_folder(name)
        for file in () if folder is None else (folder / GENERATION, folder / "config.json"):
            settings = read_object(file, key) if file.is_file() else {}
            text = settings.get("text_config")  # of a model that also sees images
            of_text = cast("dict[str, object]", text).get(EOS) if isinstance(text, dict) else None
            given = settings.get(EOS, of_text)
            for one in cast("list[object]", given if isinstance(given, list) else [given]):
                if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
                    found.append(one)
                elif given is not None:
                    what = f"{str(file)!r}: {EOS} holds {quoted(one)}, which is not a token id"
                    raise refused("not-readable", key, what, "write one id, or a list of them")
    return tuple(dict.fromkeys(found))


def fetched_folder(name: str) -> Path:
    """Return a model's folder: the path itself or a hub id's snapshot in the cache, fetched if it is incomplete.

    Ranks may call this at the same time: the hub's locks let one of them fetch. Raises ValueError.
    """
    folder = local_folder(name)
    if folder is not None and (folder == Path(name) or _is_complete(folder)):
        return folder
    what = f"policy.model_name: {name!r} is not complete"
    return _fetched(name, _OF_MODELS, what, "incomplete-model", whole=True)


def fetch_tokenizer(name: str) -> None:
    """Fetch a hub id's tokenizer into the local cache unless it is there; raises ValueError if that fails."""
    folder = local_folder(name)
    if is_hub_id(name) and (folder is None or not any(folder.glob("tokenizer*"))):
        _fetched(name, (*_OF_TOKENIZERS, GENERATION), f"{KEY}: {name!r} is not", "no-tokenizer")


def _fetched(name: str, wanted: tuple[str, ...], what: str, code: str, *, whole: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*wanted], ignore_patterns=[*_UNWANTED]))
        if whole and not _is_complete(folder):  # offline, the library accepts an incomplete one
            raise FileNotFoundError("offline, or a model without safetensors files")
        return folder
    except Exception as error:
        # Offline, unknown name, gated model, full disk: the library raises classes of four other libraries.
        reason = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
        remedy = "fetch it where there is a network, or name a local folder"
        lacking = f"{what} in the local Hugging Face cache and cannot be fetched ({reason}); {remedy}"
        raise RefusedError(lacking, code=code) from error


def _is_complete(snapshot: Path) -> bool:
    index = snapshot / INDEX
    weights = {*read_weight_map(index).values()} if index.is_file() else {ONE_FILE}
    return all((snapshot / file).is_file() for file in ("config.json", *weights))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return each tensor's file, which may be missing if an index names it; raises ValueError."""
    if (index := folder / INDEX).is_file():
        return {name: _weight_file(folder, file) for name, file in read_weight_map(index).items()}
    if not (folder / ONE_FILE).is_file():
        what = f"{str(folder)!r} holds neither {ONE_FILE} nor {INDEX}; other formats are not read"
        raise RefusedError(what, code="no-weights")
    path = _weight_file(folder, ONE_FILE)
    return dict.fromkeys(tensors_of(path), path)


def require_whole_weights(folder: Path) -> None:
    """Raise ValueError if a weight file is missing or truncated, or lacks a tensor of the index."""
    file_of = tensor_files(folder)
    held = {path: tensors_of(path) for path in dict.fromkeys(file_of.values())}
    for name, path in file_of.items():
        if name not in held[path]:
            what = f"{str(path)!r} does not hold the tensor {shortened(name)}"
            raise RefusedError(what, code="missing-tensors")


def tensors_of(path: Path) -> frozenset[str]:
    """Return the names of a safetensors file's tensors; raises ValueError for a broken, cut or overlong file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return frozenset(cast("list[str]", file.keys()))  # pyright: ignore[reportUnknownMemberType]
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"{str(path)!r} cannot be read: {error}", code="unreadable-file") from error


def read_weight_map(index: Path) -> dict[str, str]:
    """Return an index's file name for each tensor; raises ValueError for a file that is not an index."""
    try:
        content = read_json(index, finite=False)
        found = cast("dict[str, object]", content).get("weight_map") if isinstance(content, dict) else None
        if not isinstance(found, dict):
            raise ValueError("it has no weight_map")
        for name, file in cast("dict[str, object]", found).items():
            if not isinstance(file, str):
                raise ValueError(f"weight_map.{shortened(name)} is not a file name")
        return cast("dict[str, str]", found)
    except (OSError, ValueError) as error:
        what = f"{str(index)!r} is not an index of safetensors files: {error}"
        raise RefusedError(what, code="no-index") from error


def _weight_file(folder: Path, name: str) -> Path:
    """Return a weight file's path, existing or not; raises ValueError for one outside the folder.

    A snapshot in the hub's cache (`snapshots/REVISION`) may link into `blobs` beside it.
    """
    path, inside = folder / name, PurePosixPath(name)
    home, end = folder.resolve(), path.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append((home.parent.parent / "blobs").resolve())
    if inside.is_absolute() or ".." in inside.parts or not any(end.is_relative_to(one) for one in homes):
        what = f"{str(path)!r} leads out of the folder, to {str(end)!r}; name the weights' own folder"
        raise RefusedError(what, code="outside-folder")
    if end.exists() and not end.is_file():
        raise RefusedError(f"{str(path)!r} cannot be read: no regular file", code="not-a-regular-file")
    return path


def has_tokenizer(name: str) -> bool:
    folder = tokenizer_folder(name)
    return folder is not None and any(folder.glob("tokenizer*"))


def too_large(policy: PolicyConfig, rows: int, lacking: Sequence[str] = ()) -> Problem:
    """Return a problem if a tokenizer has more ids than there are embeddings; lacking: tokens without an embedding."""
    name, there = policy.tokenizer.name, policy.model.vocab_size
    without = f", none for {', '.join(map(repr, lacking))}" if lacking else ""
    if policy.weights is not None:
        weights = f"policy.{policy.weights}"
        what = f"{name!r} has {rows} ids, and the weights ({weights}) have {there} rows{without}"
        remedy = f"resize the embeddings to {rows} rows, or name the tokenizer of the weights"
        return Problem("contradicts", KEY, what, remedy, (weights,))
    what = f"{there} is below the {rows} ids of {KEY}: {name!r}{without}"
    return Problem("too-small", "policy.model.vocab_size", what, f"set vocab_size: {rows}", (KEY,))
