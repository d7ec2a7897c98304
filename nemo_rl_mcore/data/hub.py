"""Fetch a model of the Hugging Face hub.

`huggingface_hub` is imported only where something has to be fetched.
"""

# huggingface_hub leaves parameters of its functions untyped.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

from nemo_rl_mcore.data.hub_cache import is_hub_id, local_folder
from nemo_rl_mcore.data.weight_files import INDEX, ONE_FILE, read_weight_map
from nemo_rl_mcore.errors import RefusedError

_OF_TOKENIZERS = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "generation_config.json",
)
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Copies of the weights in other formats.
_UNWANTED = ("consolidated*", "original/*")


def fetched_folder(name: str) -> Path:
    """Return the folder of a model: the path itself or, for a hub id, its snapshot in the cache, completed if need be.

    Ranks of one machine may call it at the same time: the hub's locks let one of them fetch.
    Raises ValueError when the model is not here and cannot be fetched.
    """
    folder = local_folder(name)
    if folder is not None and (folder == Path(name) or _is_complete(folder)):
        return folder
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_WANTED], ignore_patterns=[*_UNWANTED]))
    except Exception as error:
        # Offline, an unknown name, a gated model, a full disk: the library raises classes of four other libraries.
        raise _not_here(name, f"{type(error).__name__}: {str(error).partition('\n')[0]}") from error
    if not _is_complete(folder):  # offline the library is content with what there is
        raise _not_here(name, "offline, or a model without safetensors files")
    return folder


def fetch_tokenizer(name: str) -> None:
    """Have the tokenizer of a hub id in the local cache, without weights; of a folder there is nothing to do.

    Raises ValueError when it is not here and cannot be fetched.
    """
    folder = local_folder(name)
    if not is_hub_id(name) or (folder is not None and any(folder.glob("tokenizer*"))):
        return
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_OF_TOKENIZERS]))
    except Exception as error:  # see above
        reason = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
        raise RefusedError(
            f"policy.tokenizer.name: {name!r} is not in the local Hugging Face cache and cannot be fetched ({reason}); "
            "fetch it where there is a network, or name a local folder",
            code="no-tokenizer",
        ) from error


def _not_here(name: str, reason: str) -> RefusedError:
    return RefusedError(
        f"policy.model_name: {name!r} is not complete in the local Hugging Face cache and cannot be fetched "
        f"({reason}); fetch it where there is a network, or name a local folder",
        code="incomplete-model",
    )


def _is_complete(snapshot: Path) -> bool:
    """Return whether the snapshot holds a config and every file of the weights."""
    index = snapshot / INDEX
    weights = {*read_weight_map(index).values()} if index.is_file() else {ONE_FILE}
    return all((snapshot / file).is_file() for file in ("config.json", *weights))
