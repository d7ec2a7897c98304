"""Strict JSON: a short ValueError where json.loads is lenient or recurses too deeply."""

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
    """Parse a file; raises ValueError as `parse_json` does, OSError as `open_regular` does."""
    return parse_json(read_regular(path, follow_links=follow_links), finite=finite)


def parse_json(text: bytes | str, *, finite: bool = True) -> object:
    """Parse a JSON text; raises ValueError for invalid or too deeply nested JSON, and for a duplicate key.

    finite: raise for NaN, Infinity and numbers too large for a float, too.
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
"""Matches any lone surrogate in JSON, escaped or encoded, and some text without one: `torn_text` decides."""


def torn_text(value: object) -> str:
    """Return the text around a value's first lone surrogate, which UTF-8 cannot encode; empty if it has none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return quoted(error.object[max(0, error.start - _AROUND) : error.end + _AROUND])
    return ""


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    with open_regular(path, follow_links=follow_links) as file:
        return file.read()


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file; raises OSError at once for anything else, such as a pipe or, if asked, a link."""
    if not follow_links and path.is_symlink():
        raise OSError(errno.ELOOP, "a link, and no file", str(path))
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(descriptor, "rb")
