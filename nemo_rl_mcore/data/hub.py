"""Fetch a model of the Hugging Face hub; `huggingface_hub` is imported only where something has to be fetched."""

# huggingface_hub leaves parameters of its functions untyped.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

from nemo_rl_mcore.config.hf.hub import local_folder
from nemo_rl_mcore.data.weight_files import read_weight_map
from nemo_rl_mcore.errors import RefusedError

_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Copies of the weights in other formats.
_UNWANTED = ("consolidated*", "original/*")


def fetched_folder(name: str) -> Path:
    """The folder of a model: the path itself or, for a hub id, its snapshot in the cache, completed if need be.

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


def _not_here(name: str, reason: str) -> RefusedError:
    return RefusedError(
        f"policy.model_name: {name!r} is not complete in the local Hugging Face cache and cannot be fetched "
        f"({reason}); fetch it where there is a network, or name a local folder",
        code="incomplete-model",
    )


def _is_complete(snapshot: Path) -> bool:
    """Whether the snapshot holds a config and every file of the weights."""
    index = snapshot / "model.safetensors.index.json"
    weights = {*read_weight_map(index).values()} if index.is_file() else {"model.safetensors"}
    return all((snapshot / file).is_file() for file in ("config.json", *weights))
