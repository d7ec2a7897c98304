"""Which files of a Hugging Face folder hold its weights, and whether they are whole; read without a framework."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import cast

from nemo_rl_mcore.data.strict_json import open_regular, parse_json, read_json
from nemo_rl_mcore.errors import RefusedError, shortened

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH = 8
"""Bytes at the beginning of a safetensors file that say how long its header is, which JSON is and comes next."""
_LONGEST_HEADER = 100_000_000
"""As in the library safetensors."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, which need not exist where an index names it; raises ValueError."""
    index = folder / INDEX
    if index.is_file():
        return {name: weight_file(folder, file) for name, file in read_weight_map(index).items()}
    if not (folder / ONE_FILE).is_file():
        raise RefusedError(
            f"{str(folder)!r} holds neither {ONE_FILE} nor {INDEX}; other formats are not read",
            code="no-weights",
        )
    path = weight_file(folder, ONE_FILE)
    return dict.fromkeys(tensors_of(path), path)


def require_whole_weights(folder: Path) -> None:
    """Raise ValueError where a file of the weights is missing or cut, or lacks a tensor that the index finds in it."""
    file_of = tensor_files(folder)
    held = {path: tensors_of(path) for path in dict.fromkeys(file_of.values())}
    for name, path in file_of.items():
        if name not in held[path]:
            raise RefusedError(
                f"{str(path)!r} does not hold the tensor {shortened(name)}", code="missing-tensors"
            )


def tensors_of(path: Path) -> frozenset[str]:
    """Return the names of a safetensors file's tensors; raises ValueError where it is broken, longer or cut."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size - _LENGTH
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(f"it says that its header has {length} bytes, and it has {size} more")
            header = parse_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        tensors = {name: one for name, one in cast("dict[str, object]", header).items() if name != _NOTES}
        end = max((_end(name, one) for name, one in tensors.items()), default=0)
        if end != size - length:
            raise ValueError(f"its header says {end} bytes of tensors, and it holds {size - length}")
    except (OSError, ValueError) as error:
        raise RefusedError(f"{str(path)!r} cannot be read: {error}", code="unreadable-file") from error
    return frozenset(tensors)


_NOTES = "__metadata__"


def _end(name: str, described: object) -> int:
    """Return where a tensor ends, as a header describes it."""
    offsets = (
        cast("dict[str, object]", described).get("data_offsets") if isinstance(described, dict) else None
    )
    match offsets:
        case [int(begin), int(end)] if 0 <= begin <= end:
            return end
        case _:
            raise ValueError(f"its header does not say where the tensor {shortened(name)} begins and ends")


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index names it; raises ValueError when it is no index."""
    try:
        content = read_json(index, finite=False)
        found = cast("dict[str, object]", content)["weight_map"] if isinstance(content, dict) else None
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"{str(index)!r} is not an index of safetensors files: {error}", code="no-index"
        ) from error
    except KeyError:
        found = None
    if not isinstance(found, dict):
        raise RefusedError(
            f"{str(index)!r} is not an index of safetensors files: it has no weight_map", code="no-index"
        )
    file_of = cast("dict[str, object]", found)
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise RefusedError(
                f"{str(index)!r}: weight_map.{shortened(name)} is no name of a file", code="no-index"
            )
    return cast("dict[str, str]", file_of)


def weight_file(folder: Path, name: str) -> Path:
    """Return the path of a file of weights, which need not exist; raises ValueError when it leads out of the folder.

    A snapshot in the hub's cache (`snapshots/REVISION`) is made of links into `blobs` beside it; those are its own.
    """
    path, inside = folder / name, PurePosixPath(name)
    home, end = folder.resolve(), path.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append((home.parent.parent / "blobs").resolve())
    if inside.is_absolute() or ".." in inside.parts or not any(end.is_relative_to(one) for one in homes):
        raise RefusedError(
            f"{str(path)!r} leads out of the folder, to {str(end)!r}; name the folder of the weights itself",
            code="outside-folder",
        )
    if end.exists() and not end.is_file():
        raise RefusedError(f"{str(path)!r} cannot be read: no regular file", code="not-a-regular-file")
    return path
