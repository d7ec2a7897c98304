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
from typing import BinaryIO, NoReturn

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
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse if finite else None,
            parse_float=_finite if finite else None,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_MAY_BE_TORN = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""The escape of half a surrogate pair, or of a whole one, and what half of one is encoded as."""


def may_be_torn(text: bytes) -> bool:
    """Return whether a value of this JSON may hold what `torn_text` looks for."""
    return _MAY_BE_TORN.search(text) is not None


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


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shortened(repr(twice))} is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{shortened(text)} is too large")
    return number
