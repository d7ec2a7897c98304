"""JSON that others wrote: what json.loads lets pass, or dies of, is a ValueError with a short message here."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nemo_rl_mcore.errors import quoted, shortened

_AROUND = 20


def read_json(path: Path, *, finite: bool = True, follow_links: bool = True) -> object:
    """Return the value in a file; raises ValueError as `parse_json` does, OSError as `read_regular` does."""
    return parse_json(read_regular(path, follow_links=follow_links), finite=finite)


def parse_json(text: bytes | str, *, finite: bool = True) -> object:
    """Return the value of a text.

    Raises ValueError for what is not JSON, for an object that names a key twice, for nesting without end and, with
    `finite`, for numbers that are none: NaN, Infinity and what is too large for a float.
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
            raise ValueError(f"{written} is no number")
        if math.isinf(number := float(written)):
            raise ValueError(f"{shortened(written)} is too large")
        return number

    number = number_of if finite else None
    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


MAY_BE_TORN = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""In JSON without it `torn_text` finds nothing: escapes of surrogates, and what half a pair is encoded as."""


def torn_text(value: object) -> str:
    """Return what stands around half a surrogate pair, which no encoding takes, in a value; empty where none is."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return quoted(error.object[max(0, error.start - _AROUND) : error.end + _AROUND])
    return ""


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    """Return the bytes of a regular file; OSError for anything else, such as a pipe, which is not waited for."""
    with open_regular(path, follow_links=follow_links) as file:
        return file.read()


@contextmanager
def open_regular(path: Path, *, follow_links: bool = True) -> Generator[BinaryIO]:
    """Open a regular file to read; OSError for anything else, such as a pipe, which is not waited for."""
    if not follow_links and path.is_symlink():
        raise OSError(errno.ELOOP, "a link, and no file", str(path))
    # Without O_NONBLOCK the opening of a pipe waits for whoever writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)
