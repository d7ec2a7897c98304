"""Strict JSON parsing: raises a short ValueError even where json.loads is lenient or recurses too deeply."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from nemo_rl_mcore.errors import quoted, shortened

_AROUND = 20


def read_json(path: Path, *, finite: bool = True, follow_links: bool = True) -> object:
    """Return the value in a file; raises ValueError as `parse_json` does, OSError as `read_regular` does."""
    return parse_json(read_regular(path, follow_links=follow_links), finite=finite)


def parse_json(text: bytes | str, *, finite: bool = True) -> object:
    """Return the value of a JSON text.

    Raises ValueError for text that is not JSON, for a duplicate key, for nesting that is too deep and, with `finite`,
    for NaN, Infinity and numbers too large for a float.
    """

    def object_of(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen = set[str]()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {shortened(repr(twice))} is there twice")
        return found

    def number_of(written: str) -> float:
        if written in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"{written} is not a number")
        if math.isinf(number := float(written)):
            raise ValueError(f"{shortened(written)} is too large")
        return number

    number = number_of if finite else None
    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


MAY_BE_TORN = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches a possible lone surrogate in JSON, escaped or encoded; without a match, `torn_text` finds none."""


def torn_text(value: object) -> str:
    """Return the text around a value's first lone surrogate, which UTF-8 cannot encode, or an empty string."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return quoted(error.object[max(0, error.start - _AROUND) : error.end + _AROUND])
    return ""


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    """Return a file's bytes. Raises OSError like `open_regular`."""
    with open_regular(path, follow_links=follow_links) as file:
        return file.read()


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises OSError at once for anything else, such as a pipe."""
    if not follow_links and path.is_symlink():
        raise OSError(errno.ELOOP, "a link, and no file", str(path))
    # Without O_NONBLOCK, opening a pipe would block until a writer opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(descriptor, "rb")
