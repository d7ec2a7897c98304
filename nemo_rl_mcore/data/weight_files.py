"""Which files of a Hugging Face folder hold its weights, and whether they are the folder's own."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import cast

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.strict_json import read_json, shortened


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index names it; raises ValueError when it is no index."""
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
    """The path of a file of weights, which need not exist; raises ValueError when it leads out of the folder.

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
