"""torch's description of a sharded state dict, `.metadata`, read without trust: it is a pickle."""

from __future__ import annotations

import io
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.errors import RefusedError, quoted, shortened

METADATA_FILE = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON_STATE = "common_state"

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_COMMON_ENTRY = re.compile(rf"{COMMON_STATE}/shard_0_1")
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}

_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "pathlib": {"PosixPath"},
}
_MOVED = {"pathlib._local": "pathlib"}
"""Module names in pickles of Python 3.13."""
_MOST_BYTES = 1 << 30
"""A description has some hundred bytes for each part of a tensor."""


def read_metadata(folder: Path) -> Metadata:
    """Return a folder's description, after checking everything in it; no code is run.

    Raises ValueError for files of another format, for links and pipes, and for a description that is broken, has wrong
    types, or points out of the folder or beyond a file's end.
    """
    sizes = _sizes(folder)
    try:
        declared = read_json(folder / FORMAT_FILE, follow_links=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / FORMAT_FILE} cannot be read: {error}") from error
    # Megatron-Core 0.18 also adds a format for entries that are not sharded.
    if not isinstance(declared, dict) or not _FORMAT.items() <= declared.items():
        raise ValueError(f"{folder / FORMAT_FILE} does not name the format {_FORMAT}")
    path = folder / METADATA_FILE
    if path.lstat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than a description can be")
    try:
        metadata = _Unpickler(io.BytesIO(read_regular(path, follow_links=False))).load()
        _check(metadata, folder, sizes)
    except pickle.UnpicklingError as error:
        raise RefusedError(
            f"{path} holds something other than tensors: {shortened(str(error), 200)}; do not load it",
            code="unsafe-pickle",
        ) from error
    except Exception as error:  # of a broken pickle: IndexError, KeyError, MemoryError ...
        raise ValueError(f"{path} is broken: {type(error).__name__}: {shortened(str(error), 200)}") from error
    return metadata


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the tensors' files, without opening any file."""
    try:
        linked, found = folder.is_symlink(), {path.name: path.lstat() for path in folder.iterdir()}
    except OSError as error:
        raise RefusedError(
            f"{folder} is not a checkpoint of a policy: {error.strerror}", code="no-checkpoint"
        ) from error
    if linked:
        raise ValueError(f"{folder} is a link; a checkpoint holds its own folders")
    for name, status in found.items():
        if name not in (METADATA_FILE, FORMAT_FILE) and not _DATA_FILE.fullmatch(name):
            raise RefusedError(
                f"{folder / shortened(name)} is not a file of a checkpoint; remove it", code="foreign-file"
            )
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(
                f"{folder / name} is not a regular file, but a link, a pipe or a folder",
                code="not-a-regular-file",
            )
    for name in (METADATA_FILE, FORMAT_FILE):
        if name not in found:
            raise RefusedError(
                f"{folder} is not a checkpoint of a policy: {folder / name} does not exist",
                code="no-checkpoint",
            )
    return {name: status.st_size for name, status in found.items() if _DATA_FILE.fullmatch(name)}


class _Unpickler(pickle.Unpickler):
    """Builds only records of numbers and names, which cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if name in _GLOBALS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check(metadata: Any, folder: Path, sizes: dict[str, int]) -> None:
    """Raise ValueError for a description that torch would not write, or that does not match the files."""
    _require(type(metadata) is Metadata, "it is not a description")
    tensors, places, meta = metadata.state_dict_metadata, metadata.storage_data, metadata.storage_meta
    _require(isinstance(tensors, dict) and isinstance(places, dict), "its entries are not dictionaries")
    _require(metadata.planner_data is None, "planner_data is not empty")
    _require(meta is None or type(meta) is StorageMeta, "storage_meta is of a wrong type")
    path_type = type(None if meta is None else meta.checkpoint_id)
    _require(path_type in (type(None), str, PosixPath), "checkpoint_id is of a wrong type")
    found: dict[tuple[str, torch.Size | None], _StorageInfo] = {}
    for index, place in cast("dict[Any, Any]", places).items():
        well_typed = (
            (type(index) is MetadataIndex and type(place) is _StorageInfo)
            and (type(index.fqn) is str and type(index.offset) in (type(None), torch.Size))
            and (type(index.index) in (type(None), int) and type(place.relative_path) is str)
            and type(place.offset) is type(place.length) is int
        )
        _require(well_typed, "an entry of storage_data is of a wrong type")
        name, end = place.relative_path, place.offset + place.length
        _require(not place.transform_descriptors, f"{name} is to be transformed")
        _require(_DATA_FILE.fullmatch(name) is not None, f"{quoted(name)} is not a file of this folder")
        _require(name in sizes, f"{folder / name} does not exist")
        _require(
            place.offset >= 0 and place.length >= 0 and end <= sizes[name],
            f"{folder / name} is cut short: {shortened(index.fqn)} lies after its end",
        )
        found[index.fqn, index.offset] = place
    wanted = 0
    for name, entry in cast("dict[Any, Any]", tensors).items():
        _require(type(name) is str, "a name is not a string")
        for offset in _parts(name, entry):
            wanted += 1
            _require((name, offset) in found, f"{name} is nowhere in the files")
            _require(wanted <= len(found), "parts are listed twice")
    _require(wanted == len(found), "it has places of tensors that it does not list")


def _parts(name: Any, entry: Any) -> Iterator[torch.Size | None]:
    """Yield the offset of each part of an entry; ValueError for a wrong type or place."""
    if type(entry) is BytesStorageMetadata:
        _require(_COMMON_ENTRY.fullmatch(name) is not None, f"{name} is not a tensor")
        yield None
        return
    _require(type(entry) is TensorStorageMetadata, f"{name} is of a wrong type")
    kind = entry.properties
    _require(type(kind) is TensorProperties, f"{name} has no properties")
    of_numbers = type(kind.dtype) is torch.dtype and kind.layout is torch.strided
    _require(of_numbers, f"{name} is not a tensor of numbers")
    _require(type(entry.size) is torch.Size and type(entry.chunks) is list, f"{name} has no size")
    for chunk in cast("list[Any]", entry.chunks):
        _require(type(chunk) is ChunkStorageMetadata, f"{name} has a part of a wrong type")
        placed = type(chunk.offsets) is type(chunk.sizes) is torch.Size
        _require(placed, f"{name} has a part without a place")
        fits = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and all(
            offset >= 0 and 0 <= length <= whole - offset
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
        _require(fits, f"{name} has a part outside of it")
        yield chunk.offsets


def _require(fine: bool, complaint: str) -> None:
    if not fine:
        raise ValueError(complaint)
