"""SHA-256 of the files of a folder, in the file that `sha256sum -c` reads: SHA256SUMS, a line `hash  path` for each.

A folder inside with a list of its own vouches for its own files: the list of the folder around holds that list's hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nemo_rl_mcore.data.strict_json import read_regular
from nemo_rl_mcore.errors import RefusedError, quoted
from nemo_rl_mcore.rank import activity

SUMS_FILE = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\x00]+)")
_CHUNK = 2**24


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes, in hexadecimal."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            activity.advance(f"taking the checksum of {path}")
            whole.update(chunk)
    return whole.hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the list of a folder; sums: the hash of each file by its path inside."""
    lines = (f"{sums[name]}  {name}\n" for name in sorted(sums))
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str] | None:
    """Return the hash of each file by its path inside; None for a folder without a list, as older ones are.

    Raises ValueError, naming the file, when the list is broken.
    """
    path = folder / SUMS_FILE
    try:
        lines = read_regular(path, follow_links=False).decode().split("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path} cannot be read: {error}", code="unreadable-checksums") from error
    sums: dict[str, str] = {}
    for line in lines[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise RefusedError(f"{path} is broken: {quoted(line)}", code="broken-checksums")
        sums[match[2]] = match[1]
    if lines[-1]:
        raise RefusedError(f"{path} is cut short", code="broken-checksums")
    return sums


def require_sums(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Compare files with the list of their folder; raises ValueError, naming the first that is not what was written."""
    for name in names:
        path = folder / name
        if name not in sums:
            raise RefusedError(
                f"{path} is not in {folder / SUMS_FILE}: it was not written with the others",
                code="unlisted-file",
            )
        try:
            differs = sha256(path) != sums[name]
        except OSError as error:
            raise RefusedError(f"{path} cannot be read: {error.strerror}", code="unreadable-file") from error
        if differs:
            raise RefusedError(
                f"{path} is not what was written: its SHA-256 differs from {folder / SUMS_FILE}",
                code="checksum-differs",
            )


def outside_of_lists(names: Iterable[str]) -> Iterator[str]:
    """Of the paths inside a folder, those that no list of a folder further inside holds."""
    names = [*names]
    listed = tuple(name.removesuffix(SUMS_FILE) for name in names if name.endswith(f"/{SUMS_FILE}"))
    return (name for name in names if not name.startswith(listed) or name.endswith(f"/{SUMS_FILE}"))
